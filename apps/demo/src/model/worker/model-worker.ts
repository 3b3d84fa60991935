import { parentPort, workerData } from "node:worker_threads";
import { KvError } from "@kv/interface";
import { DecoderSession, type Past } from "./decoder-session.js";
import { topLogprobs } from "./top-logprobs.js";
import { packWire } from "./wire-order.js";
import {
  type ForwardDone,
  type ForwardJob,
  type FromWorker,
  failed,
  setBusy,
  setIdle,
  type ToWorker,
  type WorkerData,
} from "./worker-protocol.js";

// The entry of the model's thread: ONNX Runtime blocks its thread during a step.
const port = parentPort;
if (port === null) throw new Error("model-worker is started by loadModel, not by itself");

const options = workerData as WorkerData;

// ONNX Runtime 1.30 hands half-precision data to its native part as Float16Array where the runtime
// has one (Node 24), and the native part cannot read that. This thread's globals are its own.
Reflect.deleteProperty(globalThis, "Float16Array");

/** Marks the thread idle before it sends: the receiver may start the next step at once. */
const send = (message: FromWorker, transfer: ArrayBuffer[] = []): void => {
  setIdle(options.busy);
  port.postMessage(message, transfer);
};

const pasts = new Map<string, Past>();

async function answer(message: ToWorker, decoder: DecoderSession): Promise<void> {
  if (message.kind === "close") {
    setBusy(options.busy);
    await decoder.close();
    setIdle(options.busy);
    port?.close();
  } else if (message.kind === "drop") {
    pasts.delete(message.sequenceId);
    send({ result: undefined });
  } else {
    try {
      const result = await forward(message.job, decoder);
      send({ result }, [result.newKv]);
    } catch (error) {
      send(failed(error, "KV_ENGINE_FAILED"));
    }
  }
}

async function forward(job: ForwardJob, decoder: DecoderSession): Promise<ForwardDone> {
  const { sequenceId } = job;
  const past = pastFor(job, decoder);
  const isContinued = job.past === undefined && job.position > 0;
  // A sequence that is not continued has no past until the step has succeeded.
  if (!isContinued) pasts.delete(sequenceId);
  const { logits, present } = await decoder.run(past, job.tokens);
  const top = topLogprobs(logits, job.topLogprobs);
  if (top === undefined) {
    throw new KvError(
      "KV_ENGINE_FAILED",
      `the logits after position ${present.tokens - 1} of sequence ${sequenceId} are not finite`,
      { hint: "the KV cache that was loaded for it is probably damaged" },
    );
  }
  pasts.set(sequenceId, present);
  const { kvHeads, headDim } = decoder.shape;
  const span = { total: present.tokens, from: past.tokens, to: present.tokens };
  const newKv = packWire(decoder.layersOf(present), { kvHeads, headDim, ...span });
  return { topTokens: top.tokens, topLogprobs: top.logprobs, newKv };
}

function pastFor({ sequenceId, position, past }: ForwardJob, decoder: DecoderSession): Past {
  if (past !== undefined) return decoder.pastFromWire(past.kv, past.tokens);
  if (position === 0) return decoder.pastFromWire(new ArrayBuffer(0), 0);
  const kept = pasts.get(sequenceId);
  if (kept?.tokens === position) return kept;
  throw new KvError(
    "KV_REQUEST_INVALID",
    `sequence ${sequenceId} cannot continue at position ${position}: the model holds ${kept?.tokens ?? "none"} of its tokens`,
    {
      hint: "give its past again",
      details: { sequenceId, position, held: kept?.tokens ?? 0 },
    },
  );
}

try {
  const decoder = await DecoderSession.open(options);
  port.on("message", (message: ToWorker) => void answer(message, decoder));
  send({ result: decoder.shape });
} catch (error) {
  send(failed(error, "KV_MODEL_UNSUPPORTED"));
  port.close();
}
