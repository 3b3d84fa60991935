import { VLLM_VERSIONS } from "../versions/vllm-wire.js";

/** By factor: values that a peer may have in place of ours. */
export type FactorCandidates = Readonly<Record<string, readonly unknown[]>>;

/** Values of real peers (vLLM 0.31 to 0.33 and likely successors), most likely first. */
export const COMMON_CANDIDATES: FactorCandidates = {
  vllm_version: [
    "0.33.0",
    "0.32.0",
    "0.33.1",
    "0.32.1",
    "0.31.0",
    "0.34.0",
    "0.35.0",
    "0.33.0+cpu",
    "0.32.0+cpu",
  ],
  nixl_connector_version: [15, 14, 13, 12, 11, 16, 17],
  dtype: ["torch.bfloat16", "torch.float16", "torch.float32"],
  attn_backend_name: [
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "CPU_ATTN",
    "FLEX_ATTENTION",
    "ROCM_ATTN",
    "FLASHMLA",
    "FLASH_ATTN_MLA",
    "FLASHINFER_MLA",
    "TRITON_MLA",
    "CUTLASS_MLA",
  ],
  cache_dtype: ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"],
  is_hma_enabled: [true, false],
  speculative_config: [null],
  transfer_mode: ["pull", "push"],
};

const upTo = (last: number) => Array.from({ length: last }, (_, at) => at + 1);

/** Values for a search in which only one factor differs. */
export const SINGLE_CANDIDATES: FactorCandidates = {
  vllm_version: VLLM_VERSIONS.flatMap(({ version }) => [version, `${version}+cpu`]),
  nixl_connector_version: upTo(24),
  // vLLM 0.33: `CacheDType`.
  cache_dtype: [
    "nvfp4",
    "int8_per_token_head",
    "fp8_inc",
    "fp8_ds_mla",
    "nvfp4_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "octave_k3v4",
    "octave_k3v3",
    "octave_k3v3_compact",
    "ultraquant_4bit",
    "int4_per_token_head",
    "fp8_per_token_head",
    "nvfp4_4over6",
  ],
  num_hidden_layers: upTo(256),
  num_kv_heads: upTo(128),
  head_size: [...upTo(64).map((eighth) => 8 * eighth), 576],
};

/**
 * Factors that later releases may add (vllm-project/vllm#55776): the resolved commit of the model's
 * repository, and that of its code as given.
 */
export const PROPOSED_FACTORS: readonly string[] = ["revision", "code_revision"];

/**
 * Returns the forms in which vLLM may hash a config from `--speculative-config`. None for "ngram",
 * "suffix", "draft_model" and others that do not use the target's hidden states.
 */
export function speculativeForms(
  { method, model, ...given }: Readonly<Record<string, unknown>>,
  cacheDtype: string,
): readonly Readonly<Record<string, unknown>>[] {
  const name = String(method).endsWith("mtp") ? "mtp" : method;
  if (!["eagle", "eagle3", "mtp", "dflash", "dspark"].includes(String(name))) return [];
  const parallel = given["parallel_drafting"];
  return (parallel === undefined ? [false, true] : [parallel]).map((parallel_drafting) => ({
    method: name,
    model,
    revision: given["revision"] ?? null,
    code_revision: given["code_revision"] ?? null,
    parallel_drafting,
    kv_cache_dtype: given["kv_cache_dtype"] ?? cacheDtype,
    auxiliary_layer_ids: given["auxiliary_layer_ids"] ?? null,
  }));
}

/** None, the model's own MTP layers, and ours with one member changed. */
export function speculativeCandidates(ours: Readonly<Record<string, unknown>>): readonly unknown[] {
  const { model, cache_dtype, speculative_config: own } = ours;
  const mtp = speculativeForms({ method: "mtp", model }, String(cache_dtype));
  if (typeof own !== "object" || own === null) return [null, ...mtp];
  const config = own as Readonly<Record<string, unknown>>;
  const changed = (name: string, values: readonly unknown[]) =>
    values.map((value) => ({ ...config, [name]: value }));
  const draft = config["model"];
  return [
    null,
    ...mtp,
    ...changed("method", ["eagle", "eagle3", "mtp", "dflash", "dspark"]),
    ...changed("model", typeof draft === "string" ? [model, ...modelForms(draft)] : [model]),
    ...changed("revision", [null, "main"]),
    ...changed("code_revision", [null, "main"]),
    ...changed("parallel_drafting", [false, true]),
    ...changed("kv_cache_dtype", COMMON_CANDIDATES["cache_dtype"] ?? []),
    ...changed("auxiliary_layer_ids", [null]),
  ];
}

/**
 * Returns other names for the same model: with or without a trailing slash, the hub name for a
 * directory of the hub's cache (`…/models--org--name/snapshots/…`), and a path's last one or two
 * parts.
 */
export function modelForms(model: string): readonly string[] {
  const bare = model.replace(/\/+$/, "");
  const parts = bare.split("/").filter((part) => part !== "");
  const cached = parts.find((part) => part.startsWith("models--"));
  const forms = [
    bare,
    `${bare}/`,
    ...(cached === undefined ? [] : [cached.slice("models--".length).replace("--", "/")]),
    parts.slice(-2).join("/"),
    parts.slice(-1).join("/"),
  ];
  return [...new Set(forms)].filter((form) => form !== "" && form !== model);
}
