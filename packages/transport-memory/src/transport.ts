import {
  type AgentOptions,
  type Ambient,
  KvError,
  type MemoryType,
  type Transport,
  type TransportCapabilities,
} from "@kv/interface";
import { type MemoryAgent, memoryAgent } from "./agent/agent.js";
import { AGENT_NAME } from "./agent/metadata.js";
import { allocateMemory, type MemoryRecord } from "./memory/memory.js";
import type { MemoryHost } from "./network/host.js";
import { fabricOf, type MemoryNetwork, memoryNetwork } from "./network/network.js";

export interface MemoryTransportOptions extends Partial<Ambient> {
  /** Agents meet on it; one of its own by default, so that only agents of this transport meet. */
  readonly network?: MemoryNetwork;
  /** The simulated process it belongs to; "localhost" by default. A killed one stays dead: make a new transport. */
  readonly host?: string | MemoryHost;
  /** What `allocate` gives; `["DRAM"]` by default. `VRAM` is simulated: no `bytes`, only `gather` and `scatter`. */
  readonly memoryTypes?: readonly MemoryType[];
  /** Names of backends that agents may ask for, the default first; `["MEMORY"]` by default. */
  readonly backendNames?: readonly string[];
}

const MAX_LENGTH_BYTES = 2 ** 40;

/** The embedded transport: agents of one process, over a simulated network. Makes its network with the ambient given when none is. */
export function memoryTransport(options: MemoryTransportOptions = {}): Transport {
  const network = options.network ?? memoryNetwork(options);
  const fabric = fabricOf(network);
  const host = typeof options.host === "object" ? options.host : network.host(options.host ?? "localhost");
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
      const what = host.alive ? "is closed" : `belongs to host ${host.name}, which was killed`;
      throw new KvError("KV_TRANSPORT_CLOSED", `the memory transport ${what}`);
    }
  }

  function backendsOf({ backends }: AgentOptions): readonly string[] {
    const wanted = backends?.map((backend) => backend.name) ?? backendNames.slice(0, 1);
    for (const name of wanted) {
      if (!backendNames.includes(name)) {
        throw new KvError(
          "KV_BACKEND_UNAVAILABLE",
          `the memory transport has no backend ${JSON.stringify(name)}`,
          {
            hint: `it has ${backendNames.join(", ")}; leave \`backends\` out to take the default`,
          },
        );
      }
    }
    return wanted;
  }

  return {
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
            `an agent ${JSON.stringify(name)} lives on host ${other.host.name} already`,
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
        throw new KvError("KV_MEMORY_INVALID", `${lengthBytes} is no length of a memory, in bytes`);
      }
      if (!memoryTypes.includes(memoryType)) {
        throw new KvError(
          "KV_TRANSPORT_UNSUPPORTED",
          `memory type ${memoryType}: this transport has ${memoryTypes.join(", ")}`,
        );
      }
      if (!Number.isSafeInteger(deviceId) || deviceId < 0) {
        throw new KvError("KV_MEMORY_INVALID", `device ${deviceId}`);
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
      await Promise.all([...agents].map((agent) => agent.close()));
      forgetKill();
    },
  };
}
