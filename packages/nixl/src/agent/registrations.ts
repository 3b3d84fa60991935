import { KvError, type Memory, type Registration } from "@kv/interface";
import type { NativeAgent } from "../addon/native.js";
import { registrableOf } from "../memory/registrable-memory.js";
import { requireOptions } from "../validate.js";
import type { AgentCalls } from "./agent-calls.js";

/** Options of `NixlAgent.register`. */
export interface RegisterOptions {
  /** The agent's backends to register with. @default all that support the memory */
  readonly backends?: readonly string[] | undefined;
}

export class Registrations {
  readonly #native: NativeAgent;
  readonly #calls: AgentCalls;
  readonly #ids = new WeakMap<Registration, number>();
  /** Registered memory, by the function that ends its use: its owner must not be collected. */
  readonly #held = new Map<() => void, Memory>();

  constructor(native: NativeAgent, calls: AgentCalls) {
    this.#native = native;
    this.#calls = calls;
  }

  /** Rejects with `KV_MEMORY_INVALID`, `KV_BACKEND_UNAVAILABLE` or `KV_AGENT_CLOSED`. */
  async register(
    memory: Memory,
    options: RegisterOptions,
  ): Promise<Registration & AsyncDisposable> {
    requireOptions(options, "KV_MEMORY_INVALID", "the options of register", ["backends"]);
    const { backends = [] } = options;
    if (!Array.isArray(backends) || backends.some((name) => typeof name !== "string")) {
      throw new KvError(
        "KV_BACKEND_UNAVAILABLE",
        "the backends of a registration are not a list of names",
      );
    }
    const { checkWithCuda, key, kept, hold } = registrableOf(memory);
    const release = hold();
    this.#held.set(release, memory);
    const letGo = () => {
      this.#held.delete(release);
      release();
    };
    const { memoryType, address, lengthBytes, deviceId } = memory;
    const wanted = {
      memoryType,
      address,
      lengthBytes,
      deviceId,
      key,
      checkWithCuda,
      kept,
      backends: [...new Set(backends)],
    };
    const { id } = await this.#calls
      .call((callId) => this.#native.register(callId, wanted))
      .catch((error: unknown) => {
        letGo();
        throw error;
      });
    const deregister = this.#calls.closeOnce((callId) => this.#native.deregister(callId, id));
    const close = () => deregister().then(letGo);
    const registration = Object.freeze({ memory, close, [Symbol.asyncDispose]: close });
    this.#ids.set(registration, id);
    return registration;
  }

  /** Throws `KV_MEMORY_NOT_REGISTERED` for a registration of another agent. */
  idOf(registration: Registration): number {
    const id = this.#ids.get(registration);
    if (id !== undefined) return id;
    throw new KvError("KV_MEMORY_NOT_REGISTERED", "the registration is not of this agent");
  }

  onClose(): void {
    for (const release of this.#held.keys()) release();
    this.#held.clear();
  }
}
