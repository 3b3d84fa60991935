import {
  type Agent,
  type AgentOptions,
  type AmbientOptions,
  KvError,
  type Memory,
  type MemoryType,
  settleAll,
  type Transport,
  type TransportCapabilities,
} from "@kv/interface";
import { type MemoryAgent, memoryAgent } from "./agent/agent.js";
import { AGENT_NAME } from "./agent/metadata.js";
import { allocateMemory, type MemoryRecord } from "./memory/memory.js";
import type { MemoryHost } from "./network/host.js";
import { fabricOf, type MemoryNetwork, memoryNetwork } from "./network/network.js";

/** Options of `memoryTransport`. */
export interface MemoryTransportOptions extends AmbientOptions {
  /** @default a network of its own, so that only agents of this transport reach each other */
  readonly network?: MemoryNetwork | undefined;
  /**
   * Simulated process; after its kill, create a new transport.
   * @default "localhost"
   */
  readonly host?: string | MemoryHost | undefined;
  /**
   * Memory types of `allocate`. `VRAM` is simulated: it has `gather` and `scatter`, but no `bytes`.
   * @default ["DRAM"]
   */
  readonly memoryTypes?: readonly MemoryType[] | undefined;
  /** Backends that agents may request, the default one first. @default ["MEMORY"] */
  readonly backendNames?: readonly string[] | undefined;
}

const MAX_LENGTH_BYTES = 2 ** 40;

/**
 * What `memoryTransport` creates. Agents, lists and registrations have `Symbol.asyncDispose`,
 * memory has `Symbol.dispose`.
 */
export interface MemoryTransport extends Transport, AsyncDisposable {
  createAgent(options?: AgentOptions): Promise<Agent & AsyncDisposable>;
  allocate(...options: Parameters<Transport["allocate"]>): Memory & Disposable;
}

/**
 * Creates an in-process transport over a simulated network with latency and faults.
 *
 * @throws `KV_CONFIG_INVALID` for a network that `memoryNetwork` did not create.
 */
export function memoryTransport(options: MemoryTransportOptions = {}): MemoryTransport {
  const network = options.network ?? memoryNetwork(options);
  const fabric = fabricOf(network);
  const host =
    typeof options.host === "object" ? options.host : network.host(options.host ?? "localhost");
  const log = options.log ?? fabric.log;
  const random = options.random ?? host.random;
  const memoryTypes = options.memoryTypes ?? ["DRAM"];
  const backendNames = options.backendNames ?? ["MEMORY"];
  const agents = new Set<MemoryAgent>();
  const memories = new WeakMap<object, MemoryRecord>();
  let closed = false;

  const capabilities: TransportCapabilities = {
    read: true,
    write: true,
    notifications: true,
    crossProcess: false,
    memoryTypes,
    reportsPeerDeath: fabric.reportsPeerDeath,
  };
  const forgetKill = host.onKill(() => {
    closed = true;
    for (const agent of [...agents]) agent.die();
  });

  function assertOpen(): void {
    if (closed || !host.alive) {
      const reason = host.alive ? "is closed" : `belongs to host ${host.name}, which was killed`;
      throw new KvError("KV_TRANSPORT_CLOSED", `the memory transport ${reason}`);
    }
  }

  function backendsOf({ backends }: AgentOptions): readonly string[] {
    const requested = backends?.map((backend) => backend.name) ?? backendNames.slice(0, 1);
    for (const name of requested) {
      if (!backendNames.includes(name)) {
        throw new KvError(
          "KV_BACKEND_UNAVAILABLE",
          `the memory transport has no backend ${JSON.stringify(name)}`,
          {
            hint: `it has ${backendNames.join(", ")}; leave \`backends\` out for the default`,
          },
        );
      }
    }
    return requested;
  }

  const transport: MemoryTransport = {
    name: "memory",
    capabilities,
    async createAgent(agentOptions = {}) {
      assertOpen();
      const name = agentOptions.name ?? random.uuid();
      if (typeof name !== "string" || !AGENT_NAME.test(name)) {
        throw new KvError(
          "KV_AGENT_INVALID",
          `agent name ${JSON.stringify(name)} is not 1 to 255 printable ASCII characters`,
        );
      }
      for (const other of fabric.agents.values()) {
        if (other.name === name) {
          throw new KvError(
            "KV_AGENT_INVALID",
            `an agent ${JSON.stringify(name)} already exists on host ${other.host.name}`,
          );
        }
      }
      const agent = memoryAgent({
        fabric,
        host,
        log,
        name,
        incarnation: random.uuid(),
        backends: backendsOf(agentOptions),
        recordOf: (memory) =>
          typeof memory === "object" && memory !== null ? memories.get(memory) : undefined,
        closed: (gone) => void agents.delete(gone),
      });
      agents.add(agent);
      return agent;
    },
    allocate(lengthBytes, { memoryType = memoryTypes[0] ?? "DRAM", deviceId = 0 } = {}) {
      assertOpen();
      if (!Number.isSafeInteger(lengthBytes) || lengthBytes < 1 || lengthBytes > MAX_LENGTH_BYTES) {
        throw new KvError("KV_MEMORY_INVALID", `invalid length of a memory: ${lengthBytes} bytes`);
      }
      if (!memoryTypes.includes(memoryType)) {
        throw new KvError(
          "KV_TRANSPORT_UNSUPPORTED",
          `memory type ${memoryType}: this transport has ${memoryTypes.join(", ")}`,
        );
      }
      if (!Number.isSafeInteger(deviceId) || deviceId < 0) {
        throw new KvError("KV_MEMORY_INVALID", `invalid deviceId ${deviceId}`);
      }
      const memory = allocateMemory({
        host,
        address: fabric.takeAddress(lengthBytes),
        lengthBytes,
        memoryType,
        deviceId,
        closed: (gone) => void fabric.memories.delete(gone),
      });
      memories.set(memory, memory);
      fabric.memories.add(memory);
      return memory;
    },
    async close() {
      closed = true;
      await settleAll([...agents].map((agent) => agent.close()));
      forgetKill();
    },
    [Symbol.asyncDispose]: () => transport.close(),
  };
  return transport;
}
