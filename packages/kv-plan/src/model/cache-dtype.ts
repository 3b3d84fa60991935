import { KvError } from "@kv/interface";
import type { AttentionSpec } from "./cache-spec.js";
import { type ConfigFields, isRecord } from "./config-fields.js";
import type { ModelContext } from "./model-draft.js";

/** Models that vLLM never runs in float16 (`_FLOAT16_NOT_SUPPORTED_MODELS`). */
const NO_FLOAT16: ReadonlySet<string> = new Set(["gemma2", "gemma3", "gemma3_text", "glm4"]);

/**
 * As vLLM resolves `--dtype auto`: float32 checkpoints run as bfloat16.
 * @throws `KV_CONFIG_INVALID`.
 */
export function modelDtypeOf(
  name: string,
  outer: ConfigFields,
  inner: ConfigFields,
  assumed: string[],
): string {
  const said = [outer, inner].flatMap(
    (fields) => fields.text("dtype") ?? fields.text("torch_dtype") ?? [],
  );
  const dtype = said[0]?.replace(/^torch\./, "");
  if (dtype === undefined) {
    assumed.push(
      `${name} does not say its dtype: bfloat16, as vLLM takes it (unless its safetensors say float16)`,
    );
    return "bfloat16";
  }
  const resolved = { half: "float16", float: "float32" }[dtype] ?? dtype;
  if (resolved === "float32") return "bfloat16";
  if (resolved === "float16")
    return NO_FLOAT16.has(outer.text("model_type") ?? "") ? "bfloat16" : "float16";
  if (resolved === "bfloat16") return "bfloat16";
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${name}: dtype "${dtype}" is none of bfloat16, float16, float32`,
    {
      hint: "give the config.json of a model that vLLM serves",
    },
  );
}

/**
 * vLLM's `cache_dtype`; for "auto", that of the checkpoint's quantization.
 * @throws `KV_PLAN_UNSUPPORTED` for an unknown scheme.
 */
export function resolvedCacheDtype(
  name: string,
  asked: string,
  outer: ConfigFields,
  inner: ConfigFields,
): string {
  if (asked !== "auto") return asked;
  const quantization = outer.value("quantization_config") ?? outer.value("compression_config");
  const config = quantization ?? inner.value("quantization_config");
  if (!isRecord(config)) return "auto";
  const method = methodOf(config);
  if (method.startsWith("modelopt")) return ofModelOpt(config, quantization !== undefined);
  const scheme = config["kv_cache_scheme"];
  if (method === "compressed-tensors" && isRecord(scheme)) return ofScheme(name, scheme);
  return "auto";
}

/** @throws `KV_PLAN_UNSUPPORTED` for a quantization that vLLM does not load. */
export function refuseQuantization(
  name: string,
  known: readonly string[],
  outer: ConfigFields,
  inner: ConfigFields,
): void {
  const config = outer.value("quantization_config") ?? inner.value("quantization_config");
  if (!isRecord(config)) return;
  const method = methodOf(config);
  if (method === "" || known.includes(method)) return;
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `${name}: quantization_config.quant_method is ${method}, which vLLM does not load`,
    { hint: `it loads ${known.join(", ")}` },
  );
}

function methodOf(config: Readonly<Record<string, unknown>>): string {
  const { producer, quantization, quant_method: method } = config;
  const algorithm = isRecord(quantization) ? quantization["quant_algo"] : undefined;
  const isModelOpt = isRecord(producer) && producer["name"] === "modelopt";
  const isLegacy = isRecord(quantization) && "modelopt_quant_config" in quantization;
  if ((isModelOpt || isLegacy) && typeof algorithm === "string") return "modelopt";
  return String(method ?? "")
    .toLowerCase()
    .replaceAll("compressed_tensors", "compressed-tensors");
}

/**
 * FP8 or NVFP4 by scheme or algorithm. vLLM takes others for "auto", and reads only the outermost
 * config.
 */
function ofModelOpt(config: Readonly<Record<string, unknown>>, isOutermost: boolean): string {
  if (!isOutermost) return "auto";
  const inner = isRecord(config["quantization"]) ? config["quantization"] : config;
  const said =
    inner["kv_cache_scheme"] ||
    config["kv_cache_scheme"] ||
    inner["kv_cache_quant_algo"] ||
    config["kv_cache_quant_algo"];
  if (typeof said === "string") {
    const algorithm = said.toLowerCase();
    if (algorithm === "fp8") return "fp8_e4m3";
    return algorithm === "nvfp4" ? "nvfp4" : "auto";
  }
  if (!isRecord(said) || said["type"] !== "float") return "auto";
  if (said["num_bits"] === 8 && said["dynamic"] === false) return "fp8_e4m3";
  return said["num_bits"] === 4 ? "nvfp4" : "auto";
}

function ofScheme(name: string, scheme: Readonly<Record<string, unknown>>): string {
  if (scheme["type"] === "float" && scheme["num_bits"] === 8) return "fp8";
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `${name}: quantization_config.kv_cache_scheme is ${JSON.stringify(scheme)}; floats of 8 bits are known`,
    { hint: "give the type with --kv-cache-dtype" },
  );
}

/**
 * Bytes of one head's and token's K (or V) with packed scales (vLLM 0.33:
 * `nvfp4_kv_cache_full_dim`, `TritonAttentionBackend`).
 */
const PACKED_ROW_BYTES: Readonly<Record<string, (headSize: number) => number>> = {
  nvfp4: (headSize) => Math.floor(headSize / 2) + Math.floor(headSize / 16),
  nvfp4_4over6: (headSize) => Math.floor(headSize / 2) + Math.floor(headSize / 16),
  fp8_per_token_head: (headSize) => headSize + 4,
  int8_per_token_head: (headSize) => headSize + 4,
  int4_per_token_head: (headSize) => Math.floor(headSize / 2) + 4,
};
const FP8: ReadonlySet<string> = new Set(["fp8", "fp8_e4m3", "fp8_e5m2"]);

/** Whether elements are FP8 with one scale per tensor. */
export function isFp8({ cacheDtype }: Pick<ModelContext, "cacheDtype">): boolean {
  return FP8.has(cacheDtype);
}

/**
 * With bytes of K and V where scales are packed in.
 * @throws `KV_CONFIG_INVALID` for an unknown type.
 */
export function elementsOf(
  { name, cacheDtype, modelDtype }: Pick<ModelContext, "name" | "cacheDtype" | "modelDtype">,
  headSize: number,
  headSizeV: number,
): Pick<AttentionSpec, "dtype" | "contentBytes"> {
  if (cacheDtype === "auto") return { dtype: modelDtype };
  if (FP8.has(cacheDtype)) return { dtype: "uint8" };
  if (cacheDtype === "bfloat16" || cacheDtype === "float16") {
    if (cacheDtype === modelDtype) return { dtype: cacheDtype };
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${name}: cache dtype ${cacheDtype} of a model of type ${modelDtype}: vLLM refuses it`,
      { hint: `give auto or ${modelDtype} with --kv-cache-dtype` },
    );
  }
  const packed = Object.hasOwn(PACKED_ROW_BYTES, cacheDtype)
    ? PACKED_ROW_BYTES[cacheDtype]
    : undefined;
  if (packed !== undefined)
    return {
      dtype: "uint8",
      contentBytes: packed(headSize) + (headSizeV === 0 ? 0 : packed(headSizeV)),
    };
  const known = ["bfloat16", "float16", ...FP8, ...Object.keys(PACKED_ROW_BYTES)].join(", ");
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${name}: cache dtype "${cacheDtype}" is none of ${known}`,
    {
      hint: "give it with --kv-cache-dtype",
    },
  );
}
