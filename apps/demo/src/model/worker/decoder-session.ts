import { KvError } from "@kv/interface";
import { InferenceSession, Tensor } from "onnxruntime-node";
import { float16ToFloat32, float32ToFloat16 } from "../weights/float16.js";
import { type LayerKv, unpackWire } from "./wire-order.js";
import type { SessionShape, WorkerData } from "./worker-protocol.js";

/** Of one sequence, as the model's own tensors. */
export interface Past {
  readonly tokens: number;
  readonly tensors: Readonly<Record<string, Tensor>>;
}

const pastName = /^past_key_values\.(\d+)\.(key|value)$/;
const presentOf = (name: string) => name.replace("past_key_values.", "present.");

const int64 = (values: BigInt64Array) => new Tensor("int64", values, [1, values.length]);

/** The other inputs of known exports; a model with any other input is refused. */
const inputValues: Readonly<Record<string, (tokens: Int32Array, past: number) => Tensor>> = {
  input_ids: (tokens) => int64(BigInt64Array.from(tokens, BigInt)),
  attention_mask: (tokens, past) => int64(new BigInt64Array(past + tokens.length).fill(1n)),
  position_ids: (tokens, past) => int64(BigInt64Array.from(tokens, (_, i) => BigInt(past + i))),
  use_cache_branch: (_, past) => new Tensor("bool", Uint8Array.of(past > 0 ? 1 : 0), [1]),
  num_logits_to_keep: () => new Tensor("int64", BigInt64Array.of(1n), []),
};

/**
 * A decoder exported with `past_key_values.*` and `present.*`; runs on the thread that calls it.
 */
export class DecoderSession {
  readonly shape: SessionShape;
  readonly #session: InferenceSession;
  readonly #pastNames: readonly string[];

  private constructor(session: InferenceSession, shape: SessionShape) {
    this.#session = session;
    this.shape = shape;
    this.#pastNames = session.inputNames.filter((name) => pastName.test(name));
  }

  static async open(options: WorkerData): Promise<DecoderSession> {
    const session = await InferenceSession.create(options.onnxPath, {
      executionProviders: ["cpu"],
      intraOpNumThreads: options.intraOpThreads,
      interOpNumThreads: 1,
      executionMode: "sequential",
      graphOptimizationLevel: "all",
      logSeverityLevel: 3,
    });
    try {
      return new DecoderSession(session, sessionShape(session, options));
    } catch (error) {
      await session.release();
      throw error;
    }
  }

  pastFromWire(kv: ArrayBuffer, tokens: number): Past {
    const { kvHeads, headDim, kvType } = this.shape;
    const tensorOf = (data: Float32Array) => {
      const dims = [1, kvHeads, tokens, headDim];
      return kvType === "float32"
        ? new Tensor("float32", data, dims)
        : new Tensor("float16", float32ToFloat16(data), dims);
    };
    const layers = unpackWire(kv, this.shape, tokens);
    const entries = layers.flatMap(({ key, value }, layer) => [
      [`past_key_values.${layer}.key`, tensorOf(key)],
      [`past_key_values.${layer}.value`, tensorOf(value)],
    ]);
    return { tokens, tensors: Object.fromEntries(entries) as Past["tensors"] };
  }

  /** Views where the model's type is float32. */
  layersOf({ tensors }: Past): LayerKv[] {
    return Array.from({ length: this.shape.layers }, (_, layer) => ({
      key: floats(tensors, `past_key_values.${layer}.key`),
      value: floats(tensors, `past_key_values.${layer}.value`),
    }));
  }

  /** Runs `tokens` after `past`. `logits` are those of the last position. */
  async run(past: Past, tokens: Int32Array): Promise<{ logits: Float32Array; present: Past }> {
    const feeds: Record<string, Tensor> = { ...past.tensors };
    for (const name of this.#session.inputNames) {
      const value = inputValues[name]?.(tokens, past.tokens);
      if (value !== undefined) feeds[name] = value;
    }
    const wanted = ["logits", ...this.#pastNames.map(presentOf)];
    const outputs = await this.#session.run(feeds, wanted);
    const total = past.tokens + tokens.length;
    const tensors: Record<string, Tensor> = {};
    for (const name of this.#pastNames) {
      const present = outputs[presentOf(name)];
      if (present === undefined || present.dims[2] !== total) {
        throw new KvError(
          "KV_MODEL_UNSUPPORTED",
          `output ${presentOf(name)} has the shape [${present?.dims.join(", ")}], ${total} tokens expected`,
        );
      }
      tensors[name] = present;
    }
    const rows = floats(outputs, "logits");
    const vocabSize = outputs["logits"]?.dims.at(-1) ?? 0;
    const logits = rows.subarray(rows.length - vocabSize);
    return { logits, present: { tokens: total, tensors } };
  }

  close(): Promise<void> {
    return this.#session.release();
  }
}

function floats(tensors: Readonly<Record<string, Tensor>>, name: string): Float32Array {
  const tensor = tensors[name];
  const data = tensor?.data;
  if (data instanceof Float32Array) return data;
  // Half precision: a Uint16Array, or a Float16Array where the runtime has one.
  if (ArrayBuffer.isView(data) && data.byteLength === 2 * (tensor?.size ?? 0))
    return float16ToFloat32(new Uint16Array(data.buffer, data.byteOffset, data.byteLength / 2));
  throw new KvError("KV_MODEL_UNSUPPORTED", `tensor ${name} is ${tensor?.type}`);
}

function sessionShape(session: InferenceSession, options: WorkerData): SessionShape {
  const { inputNames, outputNames, inputMetadata, outputMetadata } = session;
  const refuse = (
    message: string,
    hint = "export a decoder with past_key_values by Hugging Face optimum",
  ): never => {
    throw new KvError("KV_MODEL_UNSUPPORTED", `${options.onnxPath}: ${message}`, { hint });
  };
  const pasts = inputMetadata.filter(({ name }) => pastName.test(name));
  if (pasts.length === 0) refuse("it has no input past_key_values.0.key");
  const layers = pasts.length / 2;
  for (let layer = 0; layer < layers; layer++) {
    for (const part of ["key", "value"]) {
      const name = `past_key_values.${layer}.${part}`;
      if (!inputNames.includes(name)) refuse(`${pasts.length} inputs of the past, but no ${name}`);
      if (!outputNames.includes(presentOf(name))) refuse(`it has no output ${presentOf(name)}`);
    }
  }
  if (!outputNames.includes("logits")) refuse("it has no output logits");
  const unknown = inputNames.find(
    (name) => !pastName.test(name) && !Object.hasOwn(inputValues, name),
  );
  if (unknown !== undefined) refuse(`it has an unknown input ${unknown}`);

  const types = [...new Set(pasts.map((past) => (past.isTensor ? past.type : "no tensor")))];
  const [kvType] = types;
  if (types.length > 1 || (kvType !== "float32" && kvType !== "float16"))
    return refuse(`its past is ${types.join(" and ")}, not float32 or float16`);
  const shapes = pasts.map((past) => (past.isTensor ? past.shape : []));
  const rank = shapes[0]?.length;
  if (rank !== 4) refuse(`its past has ${rank} dimensions, not [batch, kv_heads, past, head_dim]`);
  const dimension = (axis: number, fallback: number | undefined, what: string): number => {
    const [size, ...others] = new Set(shapes.map((shape) => shape[axis]));
    if (others.length > 0) refuse(`its layers differ in ${what}: ${[size, ...others].join(", ")}`);
    if (typeof size === "number") return size;
    return fallback ?? refuse(`neither its past nor config.json has the ${what}`);
  };
  const logits = outputMetadata.find(({ name }) => name === "logits");
  const vocabSize = logits?.isTensor === true ? logits.shape.at(-1) : undefined;
  return {
    layers,
    kvHeads: dimension(1, options.kvHeads, "number of KV heads"),
    headDim: dimension(3, options.headDim, "head size"),
    kvType,
    vocabSize: typeof vocabSize === "number" ? vocabSize : undefined,
  };
}
