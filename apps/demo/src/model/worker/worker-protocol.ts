import type { KvErrorCode } from "@kv/interface";
import type { BusyFlag } from "./busy-flag.js";

/** What the model's worker thread is started with. */
export interface WorkerData {
  start: WorkerStart;
  busy: BusyFlag;
}

export interface WorkerStart {
  onnxPath: string;
  intraOpThreads: number;
  /** Of config.json: used where the ONNX file leaves the dimension symbolic. */
  kvHeads: number | undefined;
  headDim: number | undefined;
}

/** What the ONNX session says of the model. */
export interface SessionShape {
  layers: number;
  kvHeads: number;
  headDim: number;
  /** Element type of the model's own past; the wire order is float32 either way. */
  kvType: "float32" | "float16";
  vocabSize: number | undefined;
}

export interface ForwardJob {
  sequenceId: string;
  tokens: Int32Array;
  position: number;
  past: { tokens: number; kv: ArrayBuffer } | undefined;
  topLogprobs: number;
  returnKv: boolean;
}

export interface ForwardDone {
  topTokens: Int32Array;
  topLogprobs: Float32Array;
  newKv: ArrayBuffer | undefined;
  computeMs: number;
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

/** An error on its way between threads: an `Error` loses its own fields when it is cloned. */
export interface Fault {
  code: KvErrorCode;
  message: string;
  hint?: string;
  details?: Record<string, unknown>;
}

/**
 * The worker's files import nothing of the workspace at run time, so that the thread starts the same way from
 * source and from a bundle; its errors therefore become a `KvError` on the main side.
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
