import { InferenceSession, Tensor } from "onnxruntime-node";
import { float16ToFloat32, float32ToFloat16 } from "../weights/float16.js";
import { type LayerKv, unpackWire } from "./wire-order.js";
import { FaultError, type SessionShape, type WorkerStart } from "./worker-protocol.js";

/**
 * The keys and values of one sequence, as the model's own tensors: the outputs of one step are the
 * inputs of the next.
 */
export interface Past {
  tokens: number;
  tensors: Readonly<Record<string, Tensor>>;
}

/**
 * A decoder exported with `past_key_values.*` and `present.*`; runs on the thread that calls it.
 */
export type DecoderSession = ReturnType<typeof decoderSession>;

const pastName = /^past_key_values\.(\d+)\.(key|value)$/;

/** The other inputs of known exports; a model with any other input is refused. */
const inputValues: Readonly<Record<string, (tokens: Int32Array, past: number) => Tensor>> = {
  input_ids: (tokens) =>
    new Tensor("int64", BigInt64Array.from(tokens, BigInt), [1, tokens.length]),
  attention_mask: (tokens, past) =>
    new Tensor("int64", new BigInt64Array(past + tokens.length).fill(1n), [
      1,
      past + tokens.length,
    ]),
  position_ids: (tokens, past) =>
    new Tensor(
      "int64",
      BigInt64Array.from(tokens, (_, i) => BigInt(past + i)),
      [1, tokens.length],
    ),
  use_cache_branch: (_, past) => new Tensor("bool", Uint8Array.of(past > 0 ? 1 : 0), [1]),
  num_logits_to_keep: () => new Tensor("int64", BigInt64Array.of(1n), []),
};

export async function openDecoder(start: WorkerStart): Promise<DecoderSession> {
  const session = await InferenceSession.create(start.onnxPath, {
    executionProviders: ["cpu"],
    intraOpNumThreads: start.intraOpThreads,
    interOpNumThreads: 1,
    executionMode: "sequential",
    graphOptimizationLevel: "all",
    logSeverityLevel: 3,
  });
  try {
    return decoderSession(session, start);
  } catch (error) {
    await session.release();
    throw error;
  }
}

function decoderSession(session: InferenceSession, start: WorkerStart) {
  const shape = sessionShape(session, start);
  const { layers, kvHeads, headDim, kvType } = shape;
  const pastNames = Array.from({ length: layers }, (_, layer) => ({
    key: `past_key_values.${layer}.key`,
    value: `past_key_values.${layer}.value`,
  }));
  const others = session.inputNames.filter((name) => !pastName.test(name));
  const wanted = [
    "logits",
    ...pastNames.flatMap(({ key, value }) => [presentOf(key), presentOf(value)]),
  ];

  const tensorOf = (data: Float32Array, tokens: number): Tensor => {
    const dims = [1, kvHeads, tokens, headDim];
    return kvType === "float32"
      ? new Tensor("float32", data, dims)
      : new Tensor("float16", float32ToFloat16(data), dims);
  };
  const pastOf = (kv: readonly LayerKv[], tokens: number): Past => {
    const tensors: Record<string, Tensor> = {};
    pastNames.forEach((names, layer) => {
      tensors[names.key] = tensorOf(kv[layer]?.key ?? new Float32Array(0), tokens);
      tensors[names.value] = tensorOf(kv[layer]?.value ?? new Float32Array(0), tokens);
    });
    return { tokens, tensors };
  };

  return {
    shape,
    emptyPast: () => pastOf([], 0),
    pastFromWire: (kv: ArrayBuffer, tokens: number) =>
      pastOf(unpackWire(kv, shape, tokens), tokens),
    /**
     * Keys and values of every layer, each `[kv_head][token][head_dim]`; views where the model's
     * type is float32.
     */
    layersOf: ({ tensors }: Past): LayerKv[] =>
      pastNames.map(({ key, value }) => ({
        key: floats(tensors, key),
        value: floats(tensors, value),
      })),
    /** Runs `tokens` after `past`; `logits` are those of the last position. */
    async run(past: Past, tokens: Int32Array): Promise<{ logits: Float32Array; past: Past }> {
      const feeds: Record<string, Tensor> = { ...past.tensors };
      for (const name of others) {
        const make = inputValues[name];
        if (make !== undefined) feeds[name] = make(tokens, past.tokens);
      }
      const outputs = await session.run(feeds, wanted);
      const total = past.tokens + tokens.length;
      const tensors: Record<string, Tensor> = {};
      for (const name of pastNames.flatMap(({ key, value }) => [key, value])) {
        const present = outputs[presentOf(name)];
        if (present === undefined || present.dims[2] !== total) {
          throw new FaultError({
            code: "KV_MODEL_UNSUPPORTED",
            message: `output ${presentOf(name)} has the shape [${present?.dims.join(", ")}], ${total} tokens expected`,
          });
        }
        tensors[name] = present;
      }
      const rows = floats(outputs, "logits");
      const vocabSize = outputs.logits?.dims.at(-1) ?? 0;
      return { logits: rows.subarray(rows.length - vocabSize), past: { tokens: total, tensors } };
    },
    close: async () => await session.release(),
  };
}

function presentOf(name: string): string {
  return name.replace("past_key_values.", "present.");
}

function floats(tensors: Readonly<Record<string, Tensor>>, name: string): Float32Array {
  const data = tensors[name]?.data;
  if (data instanceof Float32Array) return data;
  // Half precision: a Uint16Array, or a Float16Array where the runtime has one.
  if (ArrayBuffer.isView(data) && data.byteLength === 2 * (tensors[name]?.size ?? 0)) {
    return float16ToFloat32(new Uint16Array(data.buffer, data.byteOffset, data.byteLength / 2));
  }
  throw new FaultError({
    code: "KV_MODEL_UNSUPPORTED",
    message: `tensor ${name} is ${tensors[name]?.type}`,
  });
}

function sessionShape(session: InferenceSession, start: WorkerStart): SessionShape {
  const refuse = (
    message: string,
    hint = "export a decoder with past_key_values by Hugging Face optimum",
  ): never => {
    throw new FaultError({
      code: "KV_MODEL_UNSUPPORTED",
      message: `${start.onnxPath}: ${message}`,
      hint,
    });
  };
  const pasts = session.inputMetadata.filter(({ name }) => pastName.test(name));
  const first = pasts[0];
  if (first === undefined) return refuse("it has no input past_key_values.0.key");
  const layers = pasts.length / 2;
  for (let layer = 0; layer < layers; layer++) {
    for (const part of ["key", "value"]) {
      const name = `past_key_values.${layer}.${part}`;
      if (!session.inputNames.includes(name))
        return refuse(`${pasts.length} inputs of the past, but no ${name}`);
      if (!session.outputNames.includes(presentOf(name)))
        return refuse(`it has no output ${presentOf(name)}`);
    }
  }
  if (!session.outputNames.includes("logits")) return refuse("it has no output logits");
  for (const name of session.inputNames) {
    if (!pastName.test(name) && !Object.hasOwn(inputValues, name))
      return refuse(`it has an unknown input ${name}`);
  }

  const dimension = (axis: number, fallback: number | undefined, what: string): number => {
    const sizes = new Set(pasts.map((past) => (past.isTensor ? past.shape[axis] : undefined)));
    const size = [...sizes][0];
    if (sizes.size > 1) return refuse(`its layers differ in ${what}: ${[...sizes].join(", ")}`);
    const known = typeof size === "number" ? size : fallback;
    return known ?? refuse(`neither its past nor config.json has the ${what}`);
  };
  const types = new Set(pasts.map((past) => (past.isTensor ? past.type : "no tensor")));
  const kvType = [...types][0];
  if (types.size > 1 || (kvType !== "float32" && kvType !== "float16")) {
    return refuse(`its past is ${[...types].join(" and ")}, not float32 or float16`);
  }
  if (first.isTensor && first.shape.length !== 4) {
    return refuse(
      `its past has ${first.shape.length} dimensions, not [batch, kv_heads, past, head_dim]`,
    );
  }
  const logits = session.outputMetadata.find(({ name }) => name === "logits");
  const vocabSize = logits?.isTensor === true ? logits.shape.at(-1) : undefined;
  return {
    layers,
    kvHeads: dimension(1, start.kvHeads, "number of KV heads"),
    headDim: dimension(3, start.headDim, "head size"),
    kvType,
    vocabSize: typeof vocabSize === "number" ? vocabSize : undefined,
  };
}
