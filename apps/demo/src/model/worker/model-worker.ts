import { parentPort, workerData } from "node:worker_threads";
import { setBusy, setIdle } from "./busy-flag.js";
import { type DecoderSession, openDecoder, type Past } from "./decoder-session.js";
import { topLogprobs } from "./top-logprobs.js";
import { packWire } from "./wire-order.js";
import {
  FaultError,
  type ForwardDone,
  type ForwardJob,
  type FromWorker,
  faultOf,
  type ToWorker,
  type WorkerData,
} from "./worker-protocol.js";

// The entry of the model's thread: ONNX Runtime blocks its thread during a step.
const port = parentPort;
if (port === null) throw new Error("model-worker is started by loadModel, not by itself");

const { start, busy } = workerData as WorkerData;

// ONNX Runtime 1.30 hands half-precision data to its native part as Float16Array where the runtime has one (Node 24),
// and the native part cannot read that. This thread's globals are its own.
Reflect.deleteProperty(globalThis, "Float16Array");

/** Marks the thread idle before it sends: the receiver may start the next step at once. */
const send = (message: FromWorker, transfer: ArrayBuffer[] = []): void => {
  setIdle(busy);
  port.postMessage(message, transfer);
};

async function answer(message: ToWorker, decoder: DecoderSession, sequences: Sequences): Promise<void> {
  if (message.kind === "close") {
    setBusy(busy);
    await decoder.close();
    setIdle(busy);
    port?.close();
    return;
  }
  try {
    if (message.kind === "drop") {
      sequences.drop(message.sequenceId);
      send({ kind: "done", id: message.id, result: undefined });
    } else {
      const result = await sequences.forward(message.job);
      send({ kind: "done", id: message.id, result }, [result.newKv]);
    }
  } catch (error) {
    send({ kind: "failed", id: message.id, fault: faultOf(error, "KV_ENGINE_FAILED") });
  }
}

/** The sequences of the model's thread. Each keeps its past between its steps. */
class Sequences {
  readonly #decoder: DecoderSession;
  readonly #pasts = new Map<string, Past>();

  constructor(decoder: DecoderSession) {
    this.#decoder = decoder;
  }

  async forward(job: ForwardJob): Promise<ForwardDone> {
    const { sequenceId } = job;
    const decoder = this.#decoder;
    const past = this.#pastFor(job);
    const isContinued = job.past === undefined && job.position > 0;
    // A sequence that is not continued has no past until the step has succeeded.
    if (!isContinued) this.#pasts.delete(sequenceId);
    const step = await decoder.run(past, job.tokens);
    const top = topLogprobs(step.logits, job.topLogprobs);
    if (top === undefined) {
      throw new FaultError({
        code: "KV_ENGINE_FAILED",
        message: `the logits after position ${step.past.tokens - 1} of sequence ${sequenceId} are not finite`,
        hint: "the KV cache that was loaded for it is probably damaged",
      });
    }
    this.#pasts.set(sequenceId, step.past);
    const { kvHeads, headDim } = decoder.shape;
    const newKv = packWire(decoder.layersOf(step.past), {
      kvHeads,
      headDim,
      total: step.past.tokens,
      from: past.tokens,
      to: step.past.tokens,
    });
    return { topTokens: top.tokens, topLogprobs: top.logprobs, newKv };
  }

  drop(sequenceId: string): void {
    this.#pasts.delete(sequenceId);
  }

  #pastFor({ sequenceId, position, past }: ForwardJob): Past {
    if (past !== undefined) return this.#decoder.pastFromWire(past.kv, past.tokens);
    if (position === 0) return this.#decoder.emptyPast();
    const kept = this.#pasts.get(sequenceId);
    if (kept?.tokens === position) return kept;
    throw new FaultError({
      code: "KV_REQUEST_INVALID",
      message: `sequence ${sequenceId} cannot continue at position ${position}: the model holds ${kept?.tokens ?? "none"} of its tokens`,
      hint: "give its past again",
      details: { sequenceId, position, held: kept?.tokens ?? 0 },
    });
  }
}

try {
  const decoder = await openDecoder(start);
  const sequences = new Sequences(decoder);
  // Steps run one after another in the order of their messages.
  let last: Promise<void> = Promise.resolve();
  port.on("message", (message: ToWorker) => {
    last = last.then(() => answer(message, decoder, sequences));
  });
  send({ kind: "ready", shape: decoder.shape });
} catch (error) {
  send({ kind: "unusable", fault: faultOf(error, "KV_MODEL_UNSUPPORTED") });
  port.close();
}
