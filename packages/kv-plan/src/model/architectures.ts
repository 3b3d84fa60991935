import { KvError } from "@kv/interface";
import { type ConfigFields, isRecord, OTHER_WAYS } from "./config-fields.js";
import { type DenseRules, dense, everyNthFull, multiQueryHeads } from "./families/attention.js";
import { compressedLatents } from "./families/compressed-latents.js";
import { latents, sparseLatents } from "./families/latents.js";
import { falconH1, graniteHybrid, nemotronH, zamba2 } from "./families/mamba2-hybrids.js";
import {
  deltaNets,
  jamba,
  kimiDeltas,
  mamba1State,
  mamba2State,
  mambaOnly,
  shortConvolutions,
} from "./families/state-hybrids.js";
import {
  gemma4,
  llama4,
  mimoV2,
  minimaxM3,
  nemotronNas,
  whisper,
} from "./families/uneven-attention.js";
import type { Family } from "./model-draft.js";

const LANGUAGE = "language_model.model.layers.*.self_attn.attn";
const plain = (rules: Partial<DenseRules> = {}) => dense({ family: "dense attention", ...rules });
const windowed = (rules: Partial<DenseRules>) =>
  dense({ family: "attention with windows", windows: "types", ...rules });
const qwen = (rules: Partial<DenseRules> = {}) => plain({ windows: "off", ...rules });

const llama = plain({ ignore: ["attention_head_dim", "cla_share_factor"] });
const gemma3: Partial<DenseRules> = {
  defaultTypes: everyNthFull("sliding_window_pattern", 6),
  defaultWindow: 4096,
  ignore: ["sliding_window_pattern", "_sliding_window_pattern", "use_bidirectional_attention"],
};

/** The families by the architecture that a config names, of those that vLLM 0.33 serves. */
export const FAMILIES: Readonly<Record<string, Family>> = {
  // Every layer is attention, with one window or none.
  ...named(
    llama,
    `LlamaForCausalLM LLaMAForCausalLM InternLM3ForCausalLM Ministral3ForCausalLM MistralForCausalLM
    MixtralForCausalLM CohereForCausalLM DeepseekForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
    GemmaForCausalLM Glm4ForCausalLM GlmForCausalLM Glm4MoeForCausalLM GraniteForCausalLM
    GraniteMoeForCausalLM GraniteMoeSharedForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
    MiniCPMForCausalLM NemotronForCausalLM OlmoForCausalLM Olmo2ForCausalLM OlmoeForCausalLM
    OrionForCausalLM Phi3ForCausalLM PhiForCausalLM PhiMoEForCausalLM SeedOssForCausalLM SolarForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM ArceeForCausalLM HyperCLOVAXForCausalLM TeleChat2ForCausalLM
    TeleChat3ForCausalLM`,
  ),
  ...named(plain({ ignore: ["attn_type_list"] }), "MiniMaxM2ForCausalLM"),
  ...named(
    plain({ windows: "off", ignore: ["no_rope_layers", "no_rope_layer_interval"] }),
    "SmolLM3ForCausalLM",
  ),
  ...named(
    qwen(),
    "MiMoForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM",
  ),
  ...named(
    qwen({ layerName: LANGUAGE }),
    "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration",
  ),
  ...named(
    plain({ layerName: LANGUAGE }),
    "Mistral3ForConditionalGeneration LlavaForConditionalGeneration PixtralForConditionalGeneration",
  ),
  ...named(plain({ layerName: "transformer.h.*.attn.attn" }), "GPT2LMHeadModel GPTJForCausalLM"),
  ...named(
    plain({ layerName: "model.h.*.attn.attn", kvHeads: multiQueryHeads }),
    "GPTBigCodeForCausalLM",
  ),
  ...named(
    plain({ layerName: "model.layers.*.attention.attn" }),
    "GPTNeoXForCausalLM InternLM2ForCausalLM",
  ),
  ...named(plain({ layerName: "transformer.h.*.self_attention.attn" }), "BloomForCausalLM"),
  ...named(plain({ layerName: "model.decoder.layers.*.self_attn.attn" }), "OPTForCausalLM"),
  ...named(plain({ layerName: "transformer.h.*.attn.attention.attn" }), "ExaoneForCausalLM"),
  ...named(
    plain({
      layerName: "transformer.encoder.layers.*.self_attention.attn",
      ignore: ["multi_query_attention"],
    }),
    "ChatGLMModel ChatGLMForConditionalGeneration",
  ),
  ...named(
    plain({
      layerName: "transformer.h.*.self_attention.attn",
      kvHeads: multiQueryHeads,
      keepsModelDtype: true,
    }),
    "FalconForCausalLM",
  ),
  // Some layers have a window.
  ...named(
    windowed({
      defaultTypes: everyNthFull(undefined, 2),
      defaultWindow: 4096,
      ignore: ["sliding_window_size"],
    }),
    "Gemma2ForCausalLM",
  ),
  ...named(windowed(gemma3), "Gemma3ForCausalLM"),
  ...named(windowed({ ...gemma3, layerName: LANGUAGE }), "Gemma3ForConditionalGeneration"),
  ...named(
    windowed({ defaultTypes: everyNthFull(undefined, 4), defaultWindow: 4096 }),
    "Olmo3ForCausalLM",
  ),
  ...named(
    windowed({
      defaultTypes: everyNthFull("sliding_window_pattern", 4),
      windowPlus: 1,
      defaultWindow: 4096,
    }),
    "Cohere2ForCausalLM",
  ),
  ...named(
    windowed({
      defaultTypes: everyNthFull("sliding_window_pattern", 4),
      ignore: ["sliding_window_pattern"],
    }),
    "Exaone4ForCausalLM ExaoneMoeForCausalLM ExaoneMoEForCausalLM",
  ),
  ...named(
    windowed({
      layerName: "model.layers.*.attn.attn",
      defaultTypes: (_context, layers) =>
        Array.from({ length: layers }, (_, layer) =>
          layer % 2 === 0 ? "sliding_attention" : "full_attention",
        ),
      defaultWindow: 128,
    }),
    "GptOssForCausalLM",
  ),
  ...named(windowed({}), "ApertusForCausalLM"),
  ...named(
    windowed({
      defaultTypes: everyNthFull("global_attn_every_n_layers", 4),
      ignore: ["global_attn_every_n_layers"],
    }),
    "AfmoeForCausalLM",
  ),
  ...named(
    windowed({
      layerName: LANGUAGE,
      defaultTypes: everyNthFull(undefined, 5),
      defaultWindow: 512,
      sharedLayers: { field: "num_kv_shared_layers", otherwise: 15 },
    }),
    "Gemma3nForConditionalGeneration Gemma3nForCausalLM",
  ),
  // Layers of unlike shapes.
  ...named(gemma4("language_model."), "Gemma4ForConditionalGeneration"),
  ...named(gemma4(""), "Gemma4ForCausalLM"),
  ...named(llama4("language_model."), "Llama4ForConditionalGeneration"),
  ...named(llama4(""), "Llama4ForCausalLM"),
  ...named(mimoV2, "MiMoV2FlashForCausalLM MiMoV2ForCausalLM"),
  ...named(minimaxM3("language_model."), "MiniMaxM3SparseForConditionalGeneration"),
  ...named(minimaxM3(""), "MiniMaxM3SparseForCausalLM"),
  ...named(nemotronNas, "DeciLMForCausalLM"),
  ...named(whisper, "WhisperForConditionalGeneration"),
  // Latents.
  ...named(latents(), "DeepseekV2ForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM"),
  ...named(latents(LANGUAGE), "KimiK25ForConditionalGeneration KimiVLForConditionalGeneration"),
  ...named(sparseLatents, "DeepseekV32ForCausalLM GlmMoeDsaForCausalLM"),
  ...named(compressedLatents, "DeepseekV4ForCausalLM"),
  // States.
  ...named(deltaNets(""), "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM"),
  ...named(
    deltaNets("language_model."),
    "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration",
  ),
  ...named(kimiDeltas(""), "KimiLinearForCausalLM"),
  ...named(kimiDeltas("language_model."), "KimiK3ForConditionalGeneration"),
  ...named(nemotronH, "NemotronHForCausalLM NemotronHPuzzleForCausalLM"),
  ...named(falconH1, "FalconH1ForCausalLM"),
  ...named(graniteHybrid, "GraniteMoeHybridForCausalLM"),
  ...named(zamba2, "Zamba2ForCausalLM"),
  ...named(jamba, "JambaForCausalLM"),
  ...named(shortConvolutions("model."), "Lfm2ForCausalLM Lfm2MoeForCausalLM"),
  ...named(shortConvolutions("language.model."), "Lfm2VlForConditionalGeneration"),
  ...named(mambaOnly("Mamba 1", mamba1State), "MambaForCausalLM FalconMambaForCausalLM"),
  ...named(mambaOnly("Mamba 2", mamba2State), "Mamba2ForCausalLM"),
};

/**
 * The last vLLM that served an architecture which 0.33 does not serve
 * (`_PREVIOUSLY_SUPPORTED_MODELS`).
 */
export const SERVED_UNTIL: Readonly<Record<string, string>> = {
  ...named(
    "0.23.0",
    `BambaForCausalLM MiniMaxForCausalLM MiniMaxText01ForCausalLM MiniMaxM1ForCausalLM
    MiniMaxVL01ForConditionalGeneration Dots1ForCausalLM QWenLMHeadModel InternLMForCausalLM
    InternLM2VEForCausalLM XverseForCausalLM BaiChuanForCausalLM BaichuanForCausalLM
    QwenVLForConditionalGeneration ErnieModel`,
  ),
  ...named(
    "0.24.0",
    "AquilaModel AquilaForCausalLM Grok1ModelForCausalLM Grok1ForCausalLM AyaVisionForConditionalGeneration",
  ),
  ...named(
    "0.28.0",
    "ArcticForCausalLM ChameleonForConditionalGeneration MPTForCausalLM MptForCausalLM RWForCausalLM StableLMEpochForCausalLM GritLM",
  ),
  ...named(
    "0.10.2",
    "MotifForCausalLM Phi4FlashForCausalLM MllamaForConditionalGeneration DonutForConditionalGeneration",
  ),
  Phi3SmallForCausalLM: "0.9.2",
  JAISLMHeadModel: "0.22.0",
  TeleChatForCausalLM: "0.25.0",
  PersimmonForCausalLM: "0.25.0",
  Plamo2ForCausalLM: "0.26.0",
};

/** Models without a KV cache: their attention sees a text at once, and nothing is kept. */
const WITHOUT_CACHE =
  /^(Bert|Roberta|XLMRoberta|ModernBert|NomicBert|DistilBert|Electra|Deberta|Gte|Siglip|CLIP|ViT|Albert|MPNet|HF_ColBERT|Jina(Bert|Roberta))/;

/** The place of the language model's fields in a config that has others beside it. */
const TEXT_FIELDS = ["text_config", "llm_config", "language_config"] as const;

/** One value for each of these architectures. */
function named<T>(value: T, architectures: string): Record<string, T> {
  return Object.fromEntries(architectures.split(/\s+/).map((name) => [name, value]));
}

/**
 * The family of a config's architecture.
 * @throws `KV_PLAN_UNSUPPORTED` where it names none, or with what it is and what would help.
 */
export function familyOf(
  name: string,
  config: ConfigFields,
): {
  readonly architecture: string;
  readonly family: Family;
  readonly textField: string | undefined;
} {
  const said = config.value("architectures");
  const architecture = Array.isArray(said)
    ? said.find((each) => typeof each === "string")
    : undefined;
  if (typeof architecture !== "string")
    throw new KvError("KV_PLAN_UNSUPPORTED", `${name}: architectures is missing`, {
      hint: "give the config.json of a decoder model from Hugging Face: it names the model's class",
    });
  const textField = TEXT_FIELDS.find((field) => isRecord(config.value(field)));
  const family = Object.hasOwn(FAMILIES, architecture) ? FAMILIES[architecture] : undefined;
  if (family !== undefined) return { architecture, family, textField };
  throw new KvError("KV_PLAN_UNSUPPORTED", `${name}: ${whyNot(architecture, config)}`, {
    hint: OTHER_WAYS,
    details: { architecture },
  });
}

function whyNot(architecture: string, config: ConfigFields): string {
  if (WITHOUT_CACHE.test(architecture))
    return `${architecture} has no KV cache: its attention sees a whole text at once, and nothing is kept to hand over`;
  const version = Object.hasOwn(SERVED_UNTIL, architecture)
    ? SERVED_UNTIL[architecture]
    : undefined;
  if (version !== undefined)
    return `vLLM 0.33 does not serve ${architecture}; ${version} was the last to`;
  if (config.value("is_encoder_decoder") === true)
    return `${architecture} is an encoder-decoder: the cache of its cross attention is the encoder's, and is not handed over`;
  return `no rules for the architecture ${architecture}: which layers have a cache, and of what shape, is not known here`;
}
