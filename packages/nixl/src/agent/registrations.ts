import { KvError, type Memory, type Registration } from "@kv/interface";
import type { NativeAgent } from "../addon/native.js";
import { type ExternalMemory, externalMemoryOf } from "../memory/external-memory.js";
import { nativeMemoryOf } from "../memory/host-memory.js";
import { requireObject } from "../validate.js";
import type { AgentCalls } from "./agent-calls.js";

/** Options of `NixlAgent.register`. */
export interface RegisterOptions {
  /**
   * Names of backends of the agent, to register with these only. @default all that support the
   * memory
   */
  readonly backends?: readonly string[] | undefined;
}

/** The memory that one agent has registered. */
export class Registrations {
  readonly #native: NativeAgent;
  readonly #calls: AgentCalls;
  readonly #ids = new WeakMap<Registration, number>();
  /**
   * The external memory that is registered, by the function that ends its use: its owner must not
   * be collected.
   */
  readonly #external = new Map<() => void, Memory>();

  /** For one agent. */
  constructor(native: NativeAgent, calls: AgentCalls) {
    this.#native = native;
    this.#calls = calls;
  }

  /**
   * Registers memory. Rejects with `KV_MEMORY_INVALID`, `KV_BACKEND_UNAVAILABLE` or
   * `KV_AGENT_CLOSED`.
   */
  async register(
    memory: Memory,
    options: RegisterOptions,
  ): Promise<Registration & AsyncDisposable> {
    requireObject(options, "KV_MEMORY_INVALID", "the options of register");
    const { backends = [] } = options;
    if (!Array.isArray(backends) || backends.some((name) => typeof name !== "string")) {
      throw new KvError(
        "KV_BACKEND_UNAVAILABLE",
        "the backends of a registration are not a list of names",
      );
    }
    const names = [...new Set(backends)];
    const external = externalMemoryOf(memory);
    if (external !== undefined) return await this.#registerExternal(memory, external, names);
    const buffer = nativeMemoryOf(memory);
    const { id } = await this.#calls.call((callId) => this.#native.register(callId, buffer, names));
    return this.#registration(memory, id, () => {});
  }

  /**
   * The id under which the addon knows a registration. Throws `KV_MEMORY_NOT_REGISTERED` for one of
   * another agent.
   */
  idOf(registration: Registration): number {
    const id = this.#ids.get(registration);
    if (id !== undefined) return id;
    throw new KvError("KV_MEMORY_NOT_REGISTERED", "the registration is not of this agent");
  }

  /** The agent has closed: nothing is registered any more. */
  onClose(): void {
    for (const release of this.#external.keys()) release();
    this.#external.clear();
  }

  async #registerExternal(
    memory: Memory,
    external: ExternalMemory,
    backends: readonly string[],
  ): Promise<Registration & AsyncDisposable> {
    const release = external.hold();
    this.#external.set(release, memory);
    const letGo = () => {
      this.#external.delete(release);
      release();
    };
    const { memoryType, address, lengthBytes, deviceId } = memory;
    const { checkWithCuda, key, kept } = external;
    const options = {
      memoryType,
      address,
      lengthBytes,
      deviceId,
      key,
      checkWithCuda,
      kept,
      backends,
    };
    const { id } = await this.#calls
      .call((callId) => this.#native.registerExternal(callId, options))
      .catch((error: unknown) => {
        letGo();
        throw error;
      });
    return this.#registration(memory, id, letGo);
  }

  #registration(memory: Memory, id: number, onClose: () => void): Registration & AsyncDisposable {
    const deregister = this.#calls.closeOnce((callId) => this.#native.deregister(callId, id));
    const close = () => deregister().then(onClose);
    const registration = Object.freeze({ memory, close, [Symbol.asyncDispose]: close });
    this.#ids.set(registration, id);
    return registration;
  }
}
