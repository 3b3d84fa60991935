import { KvError, type KvErrorCode, type KvErrorOptions } from "@kv/interface";
import type { KvGeometry } from "../../engine/cache/kv-layout.js";
import type { ForwardInput, ForwardOutput } from "../../engine/engine-model.js";

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

/**
 * 1 while the model's thread loads or runs a step. ONNX Runtime aborts the process (exit code 134)
 * when Node ends the thread during a call, so the process waits for it at its exit.
 */
type BusyFlag = Int32Array<SharedArrayBuffer>;

export function busyFlag(): BusyFlag {
  return new Int32Array(new SharedArrayBuffer(4)).fill(1);
}

export function setBusy(flag: BusyFlag): void {
  Atomics.store(flag, 0, 1);
}

export function setIdle(flag: BusyFlag): void {
  Atomics.store(flag, 0, 0);
  Atomics.notify(flag, 0);
}

/** A step of the longest prompt takes seconds. */
const exitWaitMs = 10_000;

// One listener for all models: Node warns of a leak at eleven listeners.
const flags = new Set<BusyFlag>();
function waitForAll(): void {
  for (const flag of flags) Atomics.wait(flag, 0, 1, exitWaitMs);
}

/** Returns a function that ends the wait. */
export function waitAtExit(flag: BusyFlag): () => void {
  if (flags.size === 0) process.on("exit", waitForAll);
  flags.add(flag);
  return () => {
    flags.delete(flag);
    if (flags.size === 0) process.off("exit", waitForAll);
  };
}
