/** Per factor, the values that a peer may have in place of ours. */
export type FactorCandidates = Readonly<Record<string, readonly unknown[]>>;

/** Values that real peers have (vLLM 0.31 to 0.33 and likely successors), most likely first. */
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

/**
 * Other names under which an engine may be started with the same model: with and without a trailing slash, the hub name for a directory of
 * the hub's cache (`…/models--org--name/snapshots/…`), and the last one and two parts of a path.
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
