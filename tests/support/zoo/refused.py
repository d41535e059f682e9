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
            OpenAIGPTLMHeadModel ReformerModelWithLMHead RemBertForCausalLM RoFormerForCausalLM TrOCRForCausalLM
            XGLMForCausalLM XLMWithLMHeadModel XLNetLMHeadModel xLSTMForCausalLM
        """,
    ),
    Reason(
        "not without an image: the class has no pass over text alone",
        "pixel_values|does not use transformers' attention interface|ragged batch",
        """
            Blip2ForConditionalGeneration BlipForConditionalGeneration GitForCausalLM IdeficsForVisionText2Text
            InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration
            Kosmos2ForConditionalGeneration
        """,
    ),
    Reason(
        "positions or masks: the class numbers rows by their places in the batch, or computes with its mask",
        "paged logits differ|DeclaredMask",
        """
            CamembertForCausalLM Data2VecTextForCausalLM DogeForCausalLM Kosmos2_5ForConditionalGeneration
            Molmo2ForConditionalGeneration RobertaForCausalLM RobertaPreLayerNormForCausalLM XLMRobertaForCausalLM
            XLMRobertaXLForCausalLM XmodForCausalLM
        """,
    ),
    Reason(
        "more packages: transformers builds the class only with timm and pillow",
        "needs more packages .*pillow, timm",
        "FastVlmForConditionalGeneration Gemma3nForConditionalGeneration PerceptionLMForConditionalGeneration",
    ),
    Reason(
        "no text model: diffusion, drafts of another model, audio codes, robots, classifiers",
        "cannot build it from its config|ragged batch|no vocab_size|lacks .* weights",
        """
            DiffusionGemmaForBlockDiffusion Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM
            MusicgenForCausalLM MusicgenMelodyForCausalLM PI0ForConditionalGeneration shieldgemma2
        """,
    ),
)


def reason_of(case: Case) -> Reason | None:
    """Why a class is refused; None if it must be exact."""
    if case.variant:
        return None
    own = {case.class_name, case.model_type}
    return next((reason for reason in REASONS if own.intersection(reason.names.split())), None)
