import { parentPort, workerData } from "node:worker_threads";
import { setBusy, setIdle } from "./busy-flag.js";
import { type DecoderSession, openDecoder } from "./decoder-session.js";
import { type Sequences, sequences } from "./sequences.js";
import { type FromWorker, faultOf, type ToWorker, type WorkerData } from "./worker-protocol.js";

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
