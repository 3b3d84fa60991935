import { KvError, type KvErrorCode, type KvErrorOptions } from "@kv/interface";
import type { KvGeometry } from "../../engine/cache/kv-layout.js";
import type { ForwardInput, ForwardOutput } from "../../engine/engine-model.js";
import type { BusyFlag } from "./busy-flag.js";

export interface WorkerData {
  readonly busy: BusyFlag;
  readonly onnxPath: string;
  readonly intraOpThreads: number;
  /** From config.json; used when the ONNX file has a symbolic dimension. */
  readonly kvHeads: number | undefined;
  readonly headDim: number | undefined;
}

/** The model's shape, as the ONNX session reports it. */
export interface SessionShape extends KvGeometry {
  /** Element type of the model's own past; the wire order is float32 either way. */
  readonly kvType: "float32" | "float16";
  readonly vocabSize: number | undefined;
}

export type ForwardJob = ForwardInput & { topLogprobs: number };

export interface ForwardDone extends ForwardOutput {
  newKv: ArrayBuffer;
}

export type ToWorker =
  | { kind: "forward"; job: ForwardJob }
  | { kind: "drop"; sequenceId: string }
  | { kind: "close" };

/** The first one has the shape of the opened session. */
export type FromWorker =
  | { result: SessionShape | ForwardDone | undefined }
  | { error: { code: KvErrorCode; message: string } & KvErrorOptions };

/** Structured clone drops the fields of an `Error`. */
export function failed(error: unknown, code: KvErrorCode): FromWorker {
  const failure = KvError.is(error)
    ? error
    : new KvError(code, error instanceof Error ? error.message : String(error));
  const { message, hint, details } = failure;
  return { error: { code: failure.code, message, hint, details } };
}
