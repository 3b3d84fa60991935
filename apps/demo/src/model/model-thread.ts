import { createRequire } from "node:module";
import { Worker } from "node:worker_threads";
import { KvError } from "@kv/interface";
import { busyFlag, setBusy, setIdle, waitAtExit } from "./worker/busy-flag.js";
import type {
  Fault,
  ForwardDone,
  FromWorker,
  SessionShape,
  ToWorker,
  WorkerData,
  WorkerStart,
} from "./worker/worker-protocol.js";

interface Call {
  message: (id: number) => ToWorker;
  transfer: readonly ArrayBuffer[];
  resolve(result: ForwardDone | undefined): void;
  reject(error: unknown): void;
}

/**
 * Starts the model's thread. Calls are queued here, so that those that have not started end with
 * `close`.
 */
export async function startModelThread(start: WorkerStart) {
  const busy = busyFlag();
  const workerData: WorkerData = { start, busy };
  const worker = new Worker(createRequire(import.meta.url).resolve("@kv/demo/model-worker"), {
    workerData,
    execArgv: [],
    name: "kv-model",
  });
  const stopWaiting = waitAtExit(busy);
  const waiting: Call[] = [];
  let current: Call | undefined;
  let nextId = 0;
  let end: KvError | undefined;

  const exited = new Promise<void>((resolve) => {
    worker.once("exit", () => {
      stopWaiting();
      resolve();
    });
  });
  const endAll = (error: KvError): void => {
    end ??= error;
    for (const call of waiting.splice(0)) call.reject(end);
  };
  const died = (error: KvError): void => {
    setIdle(busy);
    endAll(error);
    current?.reject(error);
    current = undefined;
  };
  const advance = (): void => {
    while (current === undefined) {
      const call = waiting.shift();
      if (call === undefined) return;
      try {
        setBusy(busy);
        worker.postMessage(call.message(nextId++), call.transfer);
        current = call;
      } catch (error) {
        setIdle(busy);
        call.reject(
          KvError.from(
            error,
            "KV_MEMORY_INVALID",
            "the past cannot be transferred to the model's thread",
          ),
        );
      }
    }
  };

  const shape = await new Promise<SessionShape>((resolve, reject) => {
    worker.on("error", (cause) => {
      const error = new KvError("KV_ENGINE_FAILED", `the model's thread failed: ${cause}`, {
        cause,
      });
      died(error);
      reject(error);
    });
    worker.once("exit", (code) => {
      const error = new KvError(
        "KV_ENGINE_FAILED",
        `the model's thread ended with exit code ${code}`,
      );
      died(error);
      reject(error);
    });
    worker.on("message", (message: FromWorker) => {
      if (message.kind === "ready") resolve(message.shape);
      else if (message.kind === "unusable") reject(errorOf(message.fault));
      else {
        const call = current;
        current = undefined;
        if (message.kind === "done") call?.resolve(message.result);
        else call?.reject(errorOf(message.fault));
        advance();
      }
    });
  });

  return {
    shape,
    ended: () => end !== undefined,
    async call(message: Call["message"], transfer: readonly ArrayBuffer[] = []) {
      if (end !== undefined) throw end;
      return await new Promise<ForwardDone | undefined>((resolve, reject) => {
        waiting.push({ message, transfer, resolve, reject });
        advance();
      });
    },
    async close() {
      if (end === undefined) {
        endAll(new KvError("KV_REQUEST_ABORTED", "the model was closed"));
        worker.postMessage({ kind: "close" } satisfies ToWorker);
      }
      await exited;
    },
  };
}

function errorOf({ code, message, hint, details }: Fault): KvError {
  return new KvError(code, message, {
    ...(hint === undefined ? {} : { hint }),
    ...(details === undefined ? {} : { details }),
  });
}
