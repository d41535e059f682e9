"""Classes that the engine refuses, by reason. Every class that is not here must be served exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.zoo.cases import Case


@dataclass(frozen=True, slots=True)
class Reason:
    """Why classes are refused."""

    text: str
    """For docs/models.md."""
    pattern: str
    """Part of each error."""
    names: str
    """Names of classes, or model types of classes that load several, separated by spaces."""

    def explains(self, error: Exception) -> bool:
        """Whether an error has this reason."""
        return re.search(self.pattern, str(error)) is not None


REASONS = (
    Reason(
        "recurrent: layers keep a state of their own, of a kind that specdec does not have",
        "keep state outside paged attention|keeps state outside",
        """
            Inkling2ForCausalLM Inkling2ForConditionalGeneration InklingForCausalLM InklingForConditionalGeneration
            MiniMaxForCausalLM RecurrentGemmaForCausalLM RwkvForCausalLM ZayaForCausalLM
        """,
    ),
    Reason(
        "sparse attention: an index chooses what a row reads",
        "layers of type .*(indexed|compressed_sparse|reference_sliding)_attention",
        """
            AXK2ForCausalLM DeepseekV32ForCausalLM DeepseekV4ForCausalLM Dots3NoteForCausalLM
            Dots3NoteForConditionalGeneration Glm5NextForConditionalGeneration GlmMoeDsaForCausalLM HYV4ForCausalLM
            MistralLarge4ForConditionalGeneration Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration
            UnlimitedOcrForConditionalGeneration
        """,
    ),
    Reason(
        "encoder-decoder: a decoder that reads an encoder's output",
        "encoder-decoder",
        """
            BartForCausalLM BigBirdPegasusForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM
            Florence2ForConditionalGeneration MBartForCausalLM MarianForCausalLM MvpForCausalLM PLBartForCausalLM
            PPFormulaNetForConditionalGeneration PegasusForCausalLM Pix2StructForConditionalGeneration
            ProphetNetForCausalLM T5Gemma2ForConditionalGeneration UdopForConditionalGeneration
            VisionEncoderDecoderModel WhisperForCausalLM
        """,
    ),
    Reason(
        "attention of its own: the class does not use transformers' attention interface",
        "does not use transformers' attention interface|never calls the registered|drops the keyword arguments",
        """
            BigBirdForCausalLM BloomForCausalLM BltForCausalLM CodeGenForCausalLM CpmAntForCausalLM FalconForCausalLM
            GPTJForCausalLM GPTNeoForCausalLM GPTNeoXJapaneseForCausalLM MegatronBertForCausalLM MptForCausalLM
            NemotronForCausalLM OpenAIGPTLMHeadModel ReformerModelWithLMHead RemBertForCausalLM RoFormerForCausalLM
            StableLmForCausalLM TrOCRForCausalLM XGLMForCausalLM XLMWithLMHeadModel xLSTMForCausalLM
        """,
    ),
    Reason(
        "vision-language: the text model of such a wrapper is not loaded",
        "Unrecognized configuration class|lacks .* weights|ragged batch|transformers' attention interface",
        """
            Lfm2VlForConditionalGeneration Lfm3VlForConditionalGeneration MiniCPMOcrForConditionalGeneration
            MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration NemotronH_Omni_Reasoning_V3
            shieldgemma2 AriaForConditionalGeneration AyaVisionForConditionalGeneration Blip2ForConditionalGeneration
            BlipForConditionalGeneration ChameleonForConditionalGeneration Cohere2VisionForConditionalGeneration
            CohereCompassForConditionalGeneration Cosmos3EdgeForConditionalGeneration
            Cosmos3OmniForConditionalGeneration DeepseekOcr2ForConditionalGeneration
            DeepseekVLForConditionalGeneration DeepseekVLHybridForConditionalGeneration
            DiffusionGemmaForBlockDiffusion Emu3ForCausalLM Emu3ForConditionalGeneration
            Ernie4_5_VLMoeForConditionalGeneration EvollaForProteinText2Text Exaone4_5_ForConditionalGeneration
            FastVlmForConditionalGeneration Gemma4UnifiedForConditionalGeneration GitForCausalLM
            Glm46VForConditionalGeneration Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
            GlmOcrForConditionalGeneration GotOcr2ForConditionalGeneration Granite4VisionForConditionalGeneration
            GraniteDoclingForConditionalGeneration HunYuanVLForConditionalGeneration
            HyperCLOVAXVisionV2ForConditionalGeneration Idefics2ForConditionalGeneration
            Idefics3ForConditionalGeneration IdeficsForVisionText2Text InstructBlipForConditionalGeneration
            InstructBlipVideoForConditionalGeneration InternVLForConditionalGeneration JanusForConditionalGeneration
            Kimi_K25ForConditionalGeneration Kosmos2ForConditionalGeneration Kosmos2_5ForConditionalGeneration
            LightOnOcrForConditionalGeneration LlavaForConditionalGeneration LlavaNextForConditionalGeneration
            LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration
            MiniMaxM3SparseForConditionalGeneration Mistral3ForConditionalGeneration Mistral4ForCausalLM
            MllamaForCausalLM Molmo2ForConditionalGeneration MuseGlimmerForConditionalGeneration
            MuseSparkForConditionalGeneration MusicgenForCausalLM MusicgenMelodyForCausalLM
            Ovis2ForConditionalGeneration PI0ForConditionalGeneration PaddleOCRVLForConditionalGeneration
            PaliGemmaForConditionalGeneration PerceptionLMForConditionalGeneration QianfanOCRForConditionalGeneration
            Qwen2VLForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration
            Qwen2_5_VLForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration
            Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration SmolVLMForConditionalGeneration
            Step3p7ForConditionalGeneration VideoLlama3ForConditionalGeneration VideoLlavaForConditionalGeneration
            VipLlavaForConditionalGeneration
        """,
    ),
    Reason(
        "positions: the class numbers a row by its place in the batch, not by the position it is given",
        "paged logits differ",
        """
            CamembertForCausalLM Data2VecTextForCausalLM RobertaForCausalLM RobertaPreLayerNormForCausalLM
            XLMRobertaForCausalLM XLMRobertaXLForCausalLM XmodForCausalLM
        """,
    ),
    Reason(
        "other: its forward pass fails on a batch of several sequences",
        "ragged batch|timm|layer types producing a cache",
        """
            DogeForCausalLM Gemma3nForConditionalGeneration Gemma4AssistantForCausalLM
            Gemma4UnifiedAssistantForCausalLM XLNetLMHeadModel
        """,
    ),
)


def reason_of(case: Case) -> Reason | None:
    """Why a class is refused; None if it must be exact."""
    own = {case.class_name, case.model_type}
    return next((reason for reason in REASONS if own.intersection(reason.names.split())), None)
