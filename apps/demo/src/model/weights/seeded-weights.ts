import { KvError } from "@kv/interface";
import type { DecoderConfig } from "./decoder-config.js";
import { fillNormal, mt19937 } from "./torch-random.js";
import { projectionShape, projections, type WeightSource, weightsOf } from "./weights.js";

/**
 * The weights that `torch.manual_seed(seed)` followed by `Qwen3ForCausalLM(config)` gives
 * (transformers 5.19, PyTorch 2.13, CPU), bit for bit, without Python. The order of the draws is
 * the order of construction:
 *
 * 1. every module's own initialisation (embedding: normal; linear: uniform), layer by layer: drawn
 * and discarded;
 * 2. `post_init` of the inner model: normal(0, initializer_range) over the embedding and each
 * layer's projections;
 * 3. the output head: its own uniform initialisation, discarded, then normal(0, initializer_range).
 *
 * Norm weights are ones and the padding token's embedding is zeros; they draw nothing.
 *
 * @throws KvError KV_MODEL_UNSUPPORTED for tied embeddings, biases and sizes that are not multiples
 * of 16, whose
 *   draws differ.
 */
export function seededWeights(config: DecoderConfig, { seed }: { seed: number }): WeightSource {
  const std = config.initializerRange;
  const unsupported = config.tieWordEmbeddings
    ? "tied word embeddings"
    : config.hiddenSize % 16 !== 0 || config.intermediateSize % 16 !== 0
      ? `hidden_size ${config.hiddenSize} and intermediate_size ${config.intermediateSize} (multiples of 16 only)`
      : undefined;
  if (unsupported !== undefined) {
    throw new KvError("KV_MODEL_UNSUPPORTED", `seeded weights do not support ${unsupported}`);
  }

  const random = mt19937(seed);
  const weights = new Map<string, { shape: number[]; data: Float32Array }>();
  const draw = (name: string, shape: readonly [number, number]): Float32Array => {
    const data = new Float32Array(shape[0] * shape[1]);
    fillNormal(data, random, { std });
    weights.set(name, { shape: [...shape], data });
    return data;
  };
  const ones = (name: string, length: number): void => {
    weights.set(name, { shape: [length], data: new Float32Array(length).fill(1) });
  };

  const vocabulary = [config.vocabSize, config.hiddenSize] as const;
  random.skip(vocabulary[0] * vocabulary[1]);
  for (let layer = 0; layer < config.layers; layer++) {
    for (const projection of projections) {
      const [rows, columns] = projectionShape(config, projection);
      random.skip(rows * columns);
    }
  }
  const embedding = draw("model.embed_tokens.weight", vocabulary);
  if (config.padTokenId !== undefined) {
    embedding.fill(
      0,
      config.padTokenId * config.hiddenSize,
      (config.padTokenId + 1) * config.hiddenSize,
    );
  }
  for (let layer = 0; layer < config.layers; layer++) {
    const prefix = `model.layers.${layer}`;
    for (const projection of projections) {
      draw(`${prefix}.${projection}.weight`, projectionShape(config, projection));
    }
    ones(`${prefix}.self_attn.q_norm.weight`, config.headDim);
    ones(`${prefix}.self_attn.k_norm.weight`, config.headDim);
    ones(`${prefix}.input_layernorm.weight`, config.hiddenSize);
    ones(`${prefix}.post_attention_layernorm.weight`, config.hiddenSize);
  }
  ones("model.norm.weight", config.hiddenSize);
  random.skip(vocabulary[0] * vocabulary[1]);
  draw("lm_head.weight", vocabulary);

  return weightsOf(
    weights,
    (name) => new KvError("KV_INTERNAL", `no seeded weight is named ${name}`),
  );
}
