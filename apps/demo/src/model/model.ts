import { createRequire } from "node:module";
import { Worker } from "node:worker_threads";
import { KvError } from "@kv/interface";
import type { EngineModel, EngineModelConfig, ForwardInput } from "../engine/engine-model.js";
import { type PrepareOptions, prepareModel, readModelFacts } from "./prepare-model.js";
import type {
  ForwardDone,
  FromWorker,
  SessionShape,
  ToWorker,
  WorkerData,
} from "./worker/worker-protocol.js";
import { busyFlag, setBusy, setIdle, waitAtExit } from "./worker/worker-protocol.js";

export interface ModelConfig extends EngineModelConfig {
  readonly name: string;
  readonly directory: string;
  readonly kvType: SessionShape["kvType"];
}

/**
 * A decoder on its own thread. Calls run one after another, in the order in which they were made.
 */
export interface Model extends EngineModel, AsyncDisposable {
  readonly config: ModelConfig;
  /**
   * One step of one sequence.
   * @throws `KV_REQUEST_INVALID` for a position that does not continue the worker's KV;
   * `KV_REQUEST_ABORTED` when the model is closed before the step starts; `KV_ENGINE_FAILED` when
   * the step fails or the thread dies.
   */
  forward(input: ForwardInput): Promise<ForwardDone>;
  /** After the step in progress; steps that wait are rejected. */
  close(): Promise<void>;
}

export interface LoadOptions extends PrepareOptions {
  readonly directory?: string | undefined;
  readonly intraOpThreads?: number | undefined;
}

/** @throws `KV_CONFIG_INVALID`, `KV_MODEL_UNSUPPORTED`, naming the file and what is wrong with it. */
export async function loadModel(options: LoadOptions = {}): Promise<Model> {
  const { intraOpThreads = 1 } = options;
  const { name, directory, onnxPath } = await prepareModel(options.directory, options);
  const facts = await readModelFacts(directory);
  const { kvHeads, headDim, maxModelLen, eosTokenIds } = facts;
  const busy = busyFlag();
  const thread = new ModelThread({ busy, onnxPath, intraOpThreads, kvHeads, headDim });
  const shape = await thread.opened;
  const vocabSize = shape.vocabSize ?? facts.vocabSize;
  if (vocabSize === undefined) {
    await thread.close();
    throw new KvError(
      "KV_CONFIG_INVALID",
      `neither ${onnxPath} nor config.json has the size of the vocabulary`,
    );
  }
  return {
    config: { ...shape, name, directory, vocabSize, maxModelLen, eosTokenIds },
    async forward(input) {
      const { past, topLogprobs = 1 } = input;
      // A copy: posting a view would copy its whole buffer.
      const job = { ...input, tokens: input.tokens.slice(), topLogprobs };
      const transfer = past === undefined ? [] : [past.kv];
      return (await thread.call({ kind: "forward", job }, transfer)) as ForwardDone;
    },
    async dropSequence(sequenceId) {
      await thread.call({ kind: "drop", sequenceId }).catch((error: unknown) => {
        // A thread that has ended holds no sequences.
        if (thread.end === undefined) throw error;
      });
    },
    close: () => thread.close(),
    [Symbol.asyncDispose]: () => thread.close(),
  };
}

/** The thread of `model-worker.ts`. It gets one message at a time. */
class ModelThread {
  readonly opened: Promise<SessionShape>;
  /** Why there are no more calls. */
  end: KvError | undefined;
  readonly #worker: Worker;
  readonly #busy: WorkerData["busy"];
  readonly #exited: Promise<void>;
  #last: Promise<unknown>;
  #awaited: { resolve(message: FromWorker): void; reject(error: KvError): void } | undefined;

  constructor(workerData: WorkerData) {
    const { busy } = workerData;
    this.#busy = busy;
    const file = createRequire(import.meta.url).resolve("@kv/demo/model-worker");
    this.#worker = new Worker(file, { workerData, execArgv: [], name: "kv-model" });
    const stopWaiting = waitAtExit(busy);
    const died = (reason: string, cause?: unknown) => {
      this.end ??= new KvError("KV_ENGINE_FAILED", `the model's thread ${reason}`, { cause });
      setIdle(busy);
      this.#awaited?.reject(this.end);
    };
    this.#worker.on("message", (message: FromWorker) => this.#awaited?.resolve(message));
    this.#worker.on("error", (cause) => died(`failed: ${cause}`, cause));
    this.#exited = new Promise((resolve) => {
      this.#worker.once("exit", (code) => {
        died(`ended with exit code ${code}`);
        stopWaiting();
        resolve();
      });
    });
    this.opened = this.#answer() as Promise<SessionShape>;
    this.#last = this.opened.catch(() => {});
  }

  call(message: ToWorker, transfer: readonly ArrayBuffer[] = []) {
    const answer = this.#last.then(() => {
      if (this.end !== undefined) throw this.end;
      this.#post(message, transfer);
      return this.#answer();
    });
    this.#last = answer.catch(() => {});
    return answer;
  }

  async close(): Promise<void> {
    // A step that was asked for just before begins first.
    await Promise.resolve();
    if (this.end === undefined) {
      this.end = new KvError("KV_REQUEST_ABORTED", "the model was closed");
      await this.#last;
      this.#worker.postMessage({ kind: "close" } satisfies ToWorker);
    }
    await this.#exited;
  }

  #post(message: ToWorker, transfer: readonly ArrayBuffer[]): void {
    setBusy(this.#busy);
    try {
      this.#worker.postMessage(message, transfer);
    } catch (error) {
      setIdle(this.#busy);
      const what = "the past cannot be transferred to the model's thread";
      throw KvError.from(error, "KV_MEMORY_INVALID", what);
    }
  }

  async #answer() {
    const message = await new Promise<FromWorker>((resolve, reject) => {
      this.#awaited = { resolve, reject };
    });
    if (!("error" in message)) return message.result;
    const { code, message: text, ...options } = message.error;
    throw new KvError(code, text, options);
  }
}
