import { partsOf } from "../model/architectures.js";
import { isRecord } from "../model/config-fields.js";

/** Bytes of a parameter by the method of `quantization_config`. 4 bits have scales beside them. */
const BYTES_OF_METHOD: Readonly<Record<string, number>> = {
  fp8: 1,
  mxfp4: 0.53,
  modelopt_fp4: 0.57,
};
const BYTES_OF_4_BITS = 0.53;

/**
 * Bytes of a checkpoint of Transformer layers, and the experts' share, from the sizes in its
 * config: attention, feed-forward layers, experts, embeddings. Undefined without these sizes.
 */
export function estimateWeights(
  config: unknown,
): { readonly bytes: number; readonly expertShare: number } | undefined {
  if (!isRecord(config)) return undefined;
  const inner = partsOf(config).at(-1)?.fields ?? config;
  const first = (...names: readonly string[]): number => {
    const found = names.map((name) => inner[name]).find((value) => typeof value === "number");
    return typeof found === "number" ? found : 0;
  };
  const hidden = first("hidden_size", "n_embd", "d_model");
  const layers = first("num_hidden_layers", "n_layer", "n_layers", "num_layers");
  const heads = first("num_attention_heads", "n_head", "n_heads");
  const vocabulary = first("vocab_size", "padded_vocab_size");
  const experts = first("num_experts", "n_routed_experts", "num_local_experts");
  const dense = first("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size");
  const expert = first("moe_intermediate_size", "expert_dim") || dense;
  if ([hidden, layers, heads, vocabulary, experts > 0 ? expert : dense].includes(0))
    return undefined;
  const headSize = first("head_dim") || hidden / heads;
  const kvHeads = first("num_key_value_heads", "num_kv_heads", "multi_query_group_num") || heads;
  const latent = first("kv_lora_rank");
  const attention =
    latent === 0
      ? 2 * hidden * (heads + kvHeads) * headSize
      : latentAttention(hidden, heads, latent, first);
  const plain = experts === 0 ? layers : first("first_k_dense_replace");
  const shared = first("shared_expert_intermediate_size") || first("n_shared_experts") * expert;
  const ofExperts = (layers - plain) * experts * 3 * hidden * expert;
  const others =
    layers * attention +
    plain * 3 * hidden * dense +
    (layers - plain) * (3 * hidden * shared + hidden * experts) +
    vocabulary * hidden * (config["tie_word_embeddings"] === true ? 1 : 2);
  return {
    bytes: (ofExperts + others) * bytesOfParameter(config["quantization_config"]),
    expertShare: ofExperts / (ofExperts + others),
  };
}

function latentAttention(
  hidden: number,
  heads: number,
  latent: number,
  first: (name: string) => number,
): number {
  const [position, plain, value] = [
    first("qk_rope_head_dim"),
    first("qk_nope_head_dim"),
    first("v_head_dim"),
  ];
  const query = first("q_lora_rank");
  const ofQuery =
    query === 0
      ? hidden * heads * (position + plain)
      : query * (hidden + heads * (position + plain));
  return (
    ofQuery +
    hidden * (latent + position) +
    latent * heads * (plain + value) +
    heads * value * hidden
  );
}

function bytesOfParameter(quantization: unknown): number {
  if (!isRecord(quantization)) return 2;
  const known = BYTES_OF_METHOD[String(quantization["quant_method"])];
  if (known !== undefined) return known;
  const bits = quantization["bits"];
  if (bits === 4) return BYTES_OF_4_BITS;
  return bits === 8 ? 1 : 2;
}
