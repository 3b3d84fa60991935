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

// The thread that the model runs on: ONNX Runtime blocks its caller for the whole of a step.
const port = parentPort;
if (port === null) throw new Error("model-worker is started by loadModel, not by itself");

const { start, busy } = workerData as WorkerData;

// ONNX Runtime 1.30 hands half-precision data to its native part as Float16Array where the runtime has one (Node 24),
// and the native part cannot read that. This thread's globals are its own.
Reflect.deleteProperty(globalThis, "Float16Array");

/** Idle before the message is out: its reader may start the next step at once. */
const send = (message: FromWorker, transfer: ArrayBuffer[] = []): void => {
  setIdle(busy);
  port.postMessage(message, transfer);
};

async function answer(message: ToWorker, decoder: DecoderSession, held: Sequences): Promise<void> {
  if (message.kind === "close") {
    setBusy(busy);
    await decoder.close();
    setIdle(busy);
    port?.close();
    return;
  }
  try {
    if (message.kind === "drop") {
      held.drop(message.sequenceId);
      send({ kind: "done", id: message.id, result: undefined });
    } else {
      const result = await held.forward(message.job);
      send({ kind: "done", id: message.id, result }, result.newKv === undefined ? [] : [result.newKv]);
    }
  } catch (error) {
    send({ kind: "failed", id: message.id, fault: faultOf(error, "KV_ENGINE_FAILED") });
  }
}

try {
  const decoder = await openDecoder(start);
  const held = sequences(decoder);
  // Steps follow one another in the order of their messages.
  let last: Promise<void> = Promise.resolve();
  port.on("message", (message: ToWorker) => {
    last = last.then(() => answer(message, decoder, held));
  });
  send({ kind: "ready", shape: decoder.shape });
} catch (error) {
  send({ kind: "unusable", fault: faultOf(error, "KV_MODEL_UNSUPPORTED") });
  port.close();
}

/** The sequences of one worker: each keeps its past between its steps. */
export interface Sequences {
  forward(job: ForwardJob): Promise<ForwardDone>;
  drop(sequenceId: string): void;
}

export function sequences(decoder: DecoderSession): Sequences {
  const pasts = new Map<string, Past>();

  return {
    async forward(job) {
      const before = performance.now();
      const past = pastFor(job);
      // Until the step has succeeded there is no past: a failed step must not be continued by accident.
      const kept = job.past === undefined && job.position > 0;
      if (!kept) pasts.delete(job.sequenceId);
      const step = await decoder.run(past, job.tokens);
      const top = topLogprobs(step.logits, job.topLogprobs);
      if (top === undefined) {
        throw new FaultError({
          code: "KV_ENGINE_FAILED",
          message: `the logits after position ${step.past.tokens - 1} of sequence ${job.sequenceId} are not finite`,
          hint: "the KV cache that was loaded for it is probably damaged",
        });
      }
      pasts.set(job.sequenceId, step.past);
      const { kvHeads, headDim } = decoder.shape;
      const newKv = job.returnKv
        ? packWire(decoder.layersOf(step.past), {
            kvHeads,
            headDim,
            total: step.past.tokens,
            from: past.tokens,
            to: step.past.tokens,
          })
        : undefined;
      return {
        topTokens: top.tokens,
        topLogprobs: top.logprobs,
        newKv,
        computeMs: performance.now() - before,
      };
    },
    drop(sequenceId) {
      pasts.delete(sequenceId);
    },
  };

  function pastFor({ sequenceId, position, past }: ForwardJob): Past {
    if (past !== undefined) {
      return decoder.pastFromWire(past.kv, past.tokens);
    }
    if (position === 0) return decoder.emptyPast();
    const held = pasts.get(sequenceId);
    if (held?.tokens === position) return held;
    throw new FaultError({
      code: "KV_REQUEST_INVALID",
      message: `sequence ${sequenceId} is asked to go on at position ${position}, the model holds ${held?.tokens ?? "nothing"} of it`,
      hint: "give its past again",
      details: { sequenceId, position, held: held?.tokens ?? 0 },
    });
  }
}
