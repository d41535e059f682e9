// A whole step of a Llama-like decoder in one call: embedding, layers, final norm, output rows. Threads meet at
// barriers between stages. Every number is computed by the same operations in the same order for any number of rows and
// threads.

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "thread_pool.h"

using namespace specdec;

extern "C" {

// Both are mirrored by ctypes structures in fused.py. Null: absent.
struct DecoderLayer {  // no input_norm: no attention; no post_norm: no MLP
  const float *input_norm, *query_norm, *key_norm, *post_norm;
  PackedWeight qkv, output, gate_up, down;  // gate_up: panels of both, alternating
  const float *qkv_bias, *output_bias, *gate_bias, *up_bias, *down_bias;
  AttentionView attention;
  PackedWeight router;         // [num_experts, hidden]
  const ExpertsView* experts;  // gated; in place of gate_up and down
};

struct Decoder {
  const void* embedding;         // [vocab, hidden], float32 or bfloat16
  const float *cosines, *sines;  // [positions, head_dim / 2]
  PackedWeight lm_head;
  const float *final_norm, *lm_head_bias;
  const DecoderLayer* layers;
  int64_t num_layers, hidden, intermediate, num_logits, num_embeddings, num_positions, embedding_is_bfloat16;
  int64_t num_experts, num_chosen, expert_inner, is_normalized;  // of mixtures; 0: none
  float norm_epsilon;
};

}  // extern "C"

namespace {

constexpr int64_t kPrivateNormRows = 16;  // rows up to which every thread norms all rows itself, to save a barrier

// Floats of a step's workspace: hidden, normed, qkv, attended, activated, scores of experts, and pairs of a row and an
// expert: sorted, products, inner.
struct Workspace {
  Workspace(const Decoder& decoder, int64_t num_rows, int num_threads, float* memory) {
    const AttentionView& heads = decoder.layers[0].attention;
    query_width = heads.num_heads * heads.key_dim;
    kv_width = heads.num_kv_heads * heads.key_dim;
    qkv_width = query_width + 2 * kv_width;
    hidden = memory;
    normed = hidden + num_rows * decoder.hidden;
    norm_stride = num_rows <= kPrivateNormRows ? num_rows * decoder.hidden : 0;  // one copy per thread, or one shared
    qkv = normed + (norm_stride != 0 ? num_threads : 1) * num_rows * decoder.hidden;
    attended = qkv + num_rows * qkv_width;
    activated = attended + num_rows * query_width;
    scores = activated + num_rows * decoder.intermediate;
    sorted = scores + num_rows * decoder.num_experts;
    products = sorted + num_rows * decoder.num_chosen * decoder.hidden;
    inner = products + num_rows * decoder.num_chosen * decoder.hidden;
    end = inner + num_rows * decoder.num_chosen * decoder.expert_inner;
  }
  int64_t query_width, kv_width, qkv_width, norm_stride;
  float *hidden, *normed, *qkv, *attended, *activated, *scores, *sorted, *products, *inner, *end;
};

// out = x / rms(x) * weight
void rms_norm(const float* x, const float* weight, int64_t size, float epsilon, float* out) {
  constexpr int kChains = 4;
  Vec squares[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes)
    for (int c = 0; c < kChains; ++c) {
      const Vec v = load(x + i + c * kLanes);
      squares[c] = fma(v, v, squares[c]);
    }
  for (; i < size; i += kLanes) {
    const Vec v = i + kLanes <= size ? load(x + i) : load_head(x + i, static_cast<int>(size - i));
    squares[0] = fma(v, v, squares[0]);
  }
  const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(size);
  const float scale = 1.0f / std::sqrt(mean + epsilon);
  for (i = 0; i < size; ++i) out[i] = x[i] * scale * weight[i];
}

void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float low = head[i], high = head[i + half];
    head[i] = low * cosines[i] - high * sines[i];
    head[i + half] = high * cosines[i] + low * sines[i];
  }
}

class Step {
 public:
  Step(const Decoder& decoder, const BatchView& batch, ThreadPool& pool, float* memory, float* logits)
      : decoder_(decoder),
        batch_(batch),
        pool_(pool),
        space_(decoder, batch.num_rows, pool.num_threads(), memory),
        logits_(logits) {}

  void run(int thread, int num_threads) const {
    const Share rows(batch_.num_rows, thread, num_threads);
    for (int64_t row = rows.begin; row < rows.end; ++row)
      embed(batch_.input_ids[row], space_.hidden + row * decoder_.hidden);
    pool_.barrier();
    for (int64_t i = 0; i < decoder_.num_layers; ++i) {
      tap(i, rows);
      run_layer(decoder_.layers[i], thread, num_threads);
    }
    tap(decoder_.num_layers, rows);
    tap(kFinalNorm, rows);
    project_logits(thread, num_threads);
  }

 private:
  void embed(int64_t token, float* out) const {
    const int64_t hidden = decoder_.hidden;
    if (!decoder_.embedding_is_bfloat16) {
      std::memcpy(out, static_cast<const float*>(decoder_.embedding) + token * hidden, hidden * sizeof(float));
      return;
    }
    const uint16_t* numbers = static_cast<const uint16_t*>(decoder_.embedding) + token * hidden;
    for (int64_t i = 0; i < hidden; ++i) {
      const uint32_t bits = static_cast<uint32_t>(numbers[i]) << 16;
      std::memcpy(out + i, &bits, sizeof bits);
    }
  }

  // Copies hidden states between two layers, when no thread writes them before the next barrier.
  void tap(int64_t layer, const Share& rows) const {
    const int64_t hidden = decoder_.hidden;
    for (int64_t i = 0; i < batch_.num_taps; ++i) {
      if (batch_.tap_layers[i] != layer) continue;
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        const float* from = space_.hidden + row * hidden;
        float* to = batch_.tapped + (row * batch_.num_taps + i) * hidden;
        if (layer == kFinalNorm)
          rms_norm(from, decoder_.final_norm, hidden, decoder_.norm_epsilon, to);
        else
          std::memcpy(to, from, hidden * sizeof(float));
      }
    }
  }

  void run_layer(const DecoderLayer& layer, int thread, int num_threads) const {
    if (layer.input_norm != nullptr) run_attention(layer, thread, num_threads);
    if (layer.post_norm == nullptr) return;
    if (layer.experts == nullptr)
      run_mlp(layer, thread, num_threads);
    else
      run_experts(layer, thread, num_threads);
  }

  void run_attention(const DecoderLayer& layer, int thread, int num_threads) const {
    const float* normed = norm_rows(layer.input_norm, thread, num_threads);
    if (layer.attention.num_kv_heads % num_threads == 0 && layer.attention.key_dim % kPanel == 0)
      attend_own_heads(layer, normed, thread, num_threads);
    else
      attend_together(layer, normed, thread, num_threads);
    pool_.barrier();
    project<true>(layer.output, layer.output_bias, space_.attended, space_.query_width, decoder_.hidden, space_.hidden,
                  Share(num_panels(decoder_.hidden), thread, num_threads));
    pool_.barrier();
  }

  void run_mlp(const DecoderLayer& layer, int thread, int num_threads) const {
    activate(layer, norm_rows(layer.post_norm, thread, num_threads), thread, num_threads);
    pool_.barrier();
    project<true>(layer.down, layer.down_bias, space_.activated, decoder_.intermediate, decoder_.hidden, space_.hidden,
                  Share(num_panels(decoder_.hidden), thread, num_threads));
    pool_.barrier();
  }

  void run_experts(const DecoderLayer& layer, int thread, int num_threads) const {
    const int64_t num_rows = batch_.num_rows, num_experts = decoder_.num_experts, per_row = decoder_.num_chosen;
    const float* normed = norm_rows(layer.post_norm, thread, num_threads);
    project<false>(layer.router, nullptr, normed, decoder_.hidden, num_experts, space_.scores,
                   Share(num_panels(num_experts), thread, num_threads));
    pool_.barrier();
    // Every thread makes the whole plan itself, to save barriers.
    std::vector<int64_t> chosen(num_rows * per_row);
    std::vector<float> weights(num_rows * per_row), buffer(num_experts);
    for (int64_t row = 0; row < num_rows; ++row)
      choose_experts(space_.scores + row * num_experts, num_experts, per_row, decoder_.is_normalized != 0, buffer.data(),
                     chosen.data() + row * per_row, weights.data() + row * per_row);
    const RoutingView routing{chosen.data(), weights.data(), num_rows, per_row};
    const Experts experts(*layer.experts, routing);
    experts.gather(normed, space_.sorted, thread, num_threads);
    pool_.barrier();
    experts.multiply_gate(space_.sorted, space_.inner, thread, num_threads);
    pool_.barrier();
    experts.multiply_down(space_.inner, space_.products, thread, num_threads);
    pool_.barrier();
    experts.add_up<true>(space_.products, space_.hidden, thread, num_threads);
    pool_.barrier();
  }

  // Norms the hidden rows; returns the address from which this thread reads all of them.
  const float* norm_rows(const float* weight, int thread, int num_threads) const {
    const int64_t hidden = decoder_.hidden;
    const bool is_private = space_.norm_stride != 0;
    float* normed = space_.normed + thread * space_.norm_stride;
    const Share rows(batch_.num_rows, is_private ? 0 : thread, is_private ? 1 : num_threads);
    for (int64_t row = rows.begin; row < rows.end; ++row)
      rms_norm(space_.hidden + row * hidden, weight, hidden, decoder_.norm_epsilon, normed + row * hidden);
    if (!is_private) pool_.barrier();
    return normed;
  }

  // Each thread computes whole kv heads from projection to result, without waiting for others.
  void attend_own_heads(const DecoderLayer& layer, const float* normed, int thread, int num_threads) const {
    const AttentionView& a = layer.attention;
    const int64_t panels_per_head = a.key_dim / kPanel, group = a.num_heads / a.num_kv_heads;
    const Share own(a.num_kv_heads, thread, num_threads);
    const Share heads[3] = {{own.begin * group, own.end * group},
                            {a.num_heads + own.begin, a.num_heads + own.end},
                            {a.num_heads + a.num_kv_heads + own.begin, a.num_heads + a.num_kv_heads + own.end}};
    for (const Share& part : heads)
      project<false>(layer.qkv, layer.qkv_bias, normed, decoder_.hidden, space_.qkv_width, space_.qkv,
                     Share(part.begin * panels_per_head, part.end * panels_per_head));
    for (int64_t row = 0; row < batch_.num_rows; ++row)
      for (const Share& part : heads)
        for (int64_t head = part.begin; head < part.end; ++head) place_head(layer, row, head);
    attend_kv_heads(batch_, a, attention_rows(a), own.begin, own.end);
  }

  Rows attention_rows(const AttentionView& a) const {
    return Rows{space_.qkv, space_.qkv_width, a.key_dim, space_.attended};
  }

  void attend_together(const DecoderLayer& layer, const float* normed, int thread, int num_threads) const {
    const AttentionView& a = layer.attention;
    project<false>(layer.qkv, layer.qkv_bias, normed, decoder_.hidden, space_.qkv_width, space_.qkv,
                   Share(num_panels(space_.qkv_width), thread, num_threads));
    pool_.barrier();
    const int64_t per_row = a.num_heads + 2 * a.num_kv_heads;
    const Share items(batch_.num_rows * per_row, thread, num_threads);
    for (int64_t item = items.begin; item < items.end; ++item) place_head(layer, item / per_row, item % per_row);
    pool_.barrier();
    attend_rows(batch_, a, attention_rows(a), thread, num_threads);
  }

  // y = x * weight^T + bias, or y += with `add`, for the panels of one share.
  template <bool add>
  void project(const PackedWeight& weight, const float* bias, const float* x, int64_t depth, int64_t num_outputs,
               float* y, const Share& panels) const {
    multiply(weight, panels.begin, panels.end, x, depth, batch_.num_rows, depth,
             [&](int64_t panel, int64_t first_row, int rows, const Vec* sums) {
               write_panel<add>(sums, rows, panel, bias, num_outputs, y + first_row * num_outputs, num_outputs);
             });
  }

  // Norms and rotates a query or key head of a row; writes keys and values to the row's slot.
  void place_head(const DecoderLayer& layer, int64_t row, int64_t head) const {
    const AttentionView& a = layer.attention;
    const int64_t dim = a.key_dim, half = dim / 2;
    float* data = space_.qkv + row * space_.qkv_width + head * dim;
    const bool is_query = head < a.num_heads, is_value = head >= a.num_heads + a.num_kv_heads;
    if (!is_value) {
      const float* norm = is_query ? layer.query_norm : layer.key_norm;
      if (norm != nullptr) rms_norm(data, norm, dim, decoder_.norm_epsilon, data);
      const int64_t position = batch_.position_ids[row];
      rotate(data, decoder_.cosines + position * half, decoder_.sines + position * half, half);
    }
    if (is_query) return;
    const int64_t kv_head = (head - a.num_heads) % a.num_kv_heads;
    float* store = is_value ? a.values : a.keys;
    std::memcpy(slot_address(store, batch_.slot_mapping[row], kv_head, a.num_kv_heads, batch_.block_size, dim), data,
                dim * sizeof(float));
  }

  // activated = silu(gate) * up
  void activate(const DecoderLayer& layer, const float* normed, int thread, int num_threads) const {
    const int64_t width = decoder_.intermediate;
    multiply_gated(layer.gate_up, Share(num_panels(width), thread, num_threads), normed, batch_.num_rows,
                   decoder_.hidden, width, layer.gate_bias, layer.up_bias, space_.activated);
  }

  void project_logits(int thread, int num_threads) const {
    const int64_t hidden = decoder_.hidden, num_rows = batch_.num_logits;
    const Share rows(num_rows, thread, num_threads);
    for (int64_t r = rows.begin; r < rows.end; ++r)
      rms_norm(space_.hidden + batch_.logits_indices[r] * hidden, decoder_.final_norm, hidden, decoder_.norm_epsilon,
               space_.normed + r * hidden);
    pool_.barrier();
    const Share panels(num_panels(decoder_.num_logits), thread, num_threads);
    multiply(decoder_.lm_head, panels.begin, panels.end, space_.normed, hidden, num_rows, hidden,
             [&](int64_t panel, int64_t first_row, int rows, const Vec* sums) {
               write_panel<false>(sums, rows, panel, decoder_.lm_head_bias, decoder_.num_logits,
                                  logits_ + first_row * decoder_.num_logits, decoder_.num_logits);
             });
  }

  const Decoder& decoder_;
  const BatchView& batch_;
  ThreadPool& pool_;
  const Workspace space_;
  float* logits_;
};

}  // namespace

extern "C" {

// Floats of workspace for steps of at most num_rows rows. Few rows may need more than many, as each thread norms them.
int64_t specdec_decoder_workspace(const Decoder* decoder, int64_t num_rows, int num_threads) {
  const auto floats = [&](int64_t rows) {
    return Workspace(*decoder, rows, num_threads, nullptr).end - static_cast<float*>(nullptr);
  };
  return std::max(floats(num_rows), floats(std::min(num_rows, kPrivateNormRows)));
}

// Runs one step; logits [num_logits rows, decoder->num_logits]. Returns 0. For a token id (1) or a position (2) outside
// the model it returns that number and computes nothing.
int specdec_decoder_step(void* pool_handle, const Decoder* decoder, const BatchView* batch, float* workspace,
                          float* logits) {
  for (int64_t row = 0; row < batch->num_rows; ++row) {
    if (batch->input_ids[row] < 0 || batch->input_ids[row] >= decoder->num_embeddings) return 1;
    if (batch->position_ids[row] < 0 || batch->position_ids[row] >= decoder->num_positions) return 2;
  }
  ThreadPool& pool = *static_cast<ThreadPool*>(pool_handle);
  const Step step(*decoder, *batch, pool, workspace, logits);
  pool.run([&](int thread, int num_threads) { step.run(thread, num_threads); });
  return 0;
}

}  // extern "C"
