import type { KvErrorCode } from "@kv/interface";
import type { KvGeometry } from "../../engine/cache/kv-layout.js";
import type { ForwardInput, ForwardOutput } from "../../engine/engine-model.js";
import type { BusyFlag } from "./busy-flag.js";

export interface WorkerData {
  start: WorkerStart;
  busy: BusyFlag;
}

export interface WorkerStart {
  onnxPath: string;
  intraOpThreads: number;
  /** From config.json; used when the ONNX file has a symbolic dimension. */
  kvHeads: number | undefined;
  headDim: number | undefined;
}

/** The model's shape, as the ONNX session reports it. */
export interface SessionShape extends KvGeometry {
  /** Element type of the model's own past; the wire order is float32 either way. */
  kvType: "float32" | "float16";
  vocabSize: number | undefined;
}

export type ForwardJob = ForwardInput & { topLogprobs: number };

export interface ForwardDone extends ForwardOutput {
  /** KV of the tokens of this call, in wire order. */
  newKv: ArrayBuffer;
}

export type ToWorker =
  | { kind: "forward"; id: number; job: ForwardJob }
  | { kind: "drop"; id: number; sequenceId: string }
  | { kind: "close" };

export type FromWorker =
  | { kind: "ready"; shape: SessionShape }
  | { kind: "unusable"; fault: Fault }
  | { kind: "done"; id: number; result: ForwardDone | undefined }
  | { kind: "failed"; id: number; fault: Fault };

/** An error that is sent between threads: structured clone drops the fields of an `Error`. */
export interface Fault {
  code: KvErrorCode;
  message: string;
  hint?: string;
  details?: Record<string, unknown>;
}

/**
 * The worker's files import nothing of the workspace at run time, so that the thread starts the
 * same way from source and from a bundle. The main thread turns their errors into a `KvError`.
 */
export class FaultError extends Error {
  readonly fault: Fault;
  constructor(fault: Fault) {
    super(fault.message);
    this.fault = fault;
  }
}

export function faultOf(error: unknown, code: KvErrorCode): Fault {
  if (error instanceof FaultError) return error.fault;
  return { code, message: error instanceof Error ? error.message : String(error) };
}
