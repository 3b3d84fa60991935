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

// ONNX Runtime 1.30 hands half-precision data to its native part as Float16Array where the runtime
// has one (Node 24), and the native part cannot read that. This thread's globals are its own.
Reflect.deleteProperty(globalThis, "Float16Array");

/** Marks the thread idle before it sends: the receiver may start the next step at once. */
const send = (message: FromWorker, transfer: ArrayBuffer[] = []): void => {
  setIdle(busy);
  port.postMessage(message, transfer);
};

const pasts = new Map<string, Past>();

async function answer(message: ToWorker, decoder: DecoderSession): Promise<void> {
  if (message.kind === "close") {
    setBusy(busy);
    await decoder.close();
    setIdle(busy);
    port?.close();
    return;
  }
  try {
    if (message.kind === "drop") {
      pasts.delete(message.sequenceId);
      send({ kind: "done", id: message.id, result: undefined });
    } else {
      const result = await forward(message.job, decoder);
      send({ kind: "done", id: message.id, result }, [result.newKv]);
    }
  } catch (error) {
    send({ kind: "failed", id: message.id, fault: faultOf(error, "KV_ENGINE_FAILED") });
  }
}

async function forward(job: ForwardJob, decoder: DecoderSession): Promise<ForwardDone> {
  const { sequenceId } = job;
  const past = pastFor(job, decoder);
  const isContinued = job.past === undefined && job.position > 0;
  // A sequence that is not continued has no past until the step has succeeded.
  if (!isContinued) pasts.delete(sequenceId);
  const step = await decoder.run(past, job.tokens);
  const top = topLogprobs(step.logits, job.topLogprobs);
  if (top === undefined) {
    throw new FaultError({
      code: "KV_ENGINE_FAILED",
      message: `the logits after position ${step.past.tokens - 1} of sequence ${sequenceId} are not finite`,
      hint: "the KV cache that was loaded for it is probably damaged",
    });
  }
  pasts.set(sequenceId, step.past);
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

function pastFor({ sequenceId, position, past }: ForwardJob, decoder: DecoderSession): Past {
  if (past !== undefined) return decoder.pastFromWire(past.kv, past.tokens);
  if (position === 0) return decoder.emptyPast();
  const kept = pasts.get(sequenceId);
  if (kept?.tokens === position) return kept;
  throw new FaultError({
    code: "KV_REQUEST_INVALID",
    message: `sequence ${sequenceId} cannot continue at position ${position}: the model holds ${kept?.tokens ?? "none"} of its tokens`,
    hint: "give its past again",
    details: { sequenceId, position, held: kept?.tokens ?? 0 },
  });
}

try {
  const decoder = await openDecoder(start);
  // Steps run one after another in the order of their messages.
  let last: Promise<void> = Promise.resolve();
  port.on("message", (message: ToWorker) => {
    last = last.then(() => answer(message, decoder));
  });
  send({ kind: "ready", shape: decoder.shape });
} catch (error) {
  send({ kind: "unusable", fault: faultOf(error, "KV_MODEL_UNSUPPORTED") });
  port.close();
}
