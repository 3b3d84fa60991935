import { join } from "node:path";
import { KvError } from "@kv/interface";
import { z } from "zod";
import { exists, readJson } from "./weights/checkpoint.js";

/** Facts from the JSON files of a model. The number of layers and the KV shape are read from the ONNX session. */
export interface ModelFacts {
  kvHeads: number | undefined;
  headDim: number | undefined;
  vocabSize: number | undefined;
  /** Most tokens of a sequence, prompt and output together. */
  maxModelLen: number;
  eosTokenIds: readonly number[];
}

const size = z.number().int().positive().nullish();
const tokenIds = z.union([z.number().int().nonnegative(), z.array(z.number().int().nonnegative())]).nullish();
const schema = z.looseObject({
  num_attention_heads: size,
  num_key_value_heads: size,
  hidden_size: size,
  head_dim: size,
  vocab_size: size,
  max_position_embeddings: size,
  n_positions: size,
  n_head: size,
  n_embd: size,
  eos_token_id: tokenIds,
});
const generationSchema = z.looseObject({ eos_token_id: tokenIds });

/**
 * Reads config.json and, where present, generation_config.json (whose end-of-sequence tokens take precedence, as in vLLM).
 *
 * @throws KvError KV_CONFIG_INVALID naming the file and the value.
 */
export async function readModelFacts(directory: string): Promise<ModelFacts> {
  const read = async <T>(file: string, shape: z.ZodType<T>): Promise<T> => {
    const path = join(directory, file);
    const parsed = shape.safeParse(await readJson(path));
    if (!parsed.success) throw new KvError("KV_CONFIG_INVALID", `${path}: ${z.prettifyError(parsed.error)}`);
    return parsed.data;
  };
  const config = await read("config.json", schema);
  const generation = (await exists(join(directory, "generation_config.json")))
    ? await read("generation_config.json", generationSchema)
    : undefined;

  const maxModelLen = config.max_position_embeddings ?? config.n_positions;
  if (maxModelLen == null) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${join(directory, "config.json")} has neither max_position_embeddings nor n_positions`,
    );
  }
  const heads = config.num_attention_heads ?? config.n_head ?? undefined;
  const hiddenSize = config.hidden_size ?? config.n_embd ?? undefined;
  const eos = generation?.eos_token_id ?? config.eos_token_id ?? [];
  return {
    kvHeads: config.num_key_value_heads ?? heads,
    headDim:
      config.head_dim ?? (heads !== undefined && hiddenSize !== undefined ? hiddenSize / heads : undefined),
    vocabSize: config.vocab_size ?? undefined,
    maxModelLen,
    eosTokenIds: typeof eos === "number" ? [eos] : eos,
  };
}
