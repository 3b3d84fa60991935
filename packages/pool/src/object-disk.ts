import { type Agent, KvError, type Memory, type PreparedList, type Transport } from "@kv/interface";
import { objectMemory } from "@kv/nixl";
import { type Disk, HEADER_BYTES } from "./block-file.js";
import { move, movedBlocks, slotsOf } from "./nixl-disk.js";

/** A bucket of an object store. */
export interface ObjectStore {
  /**
   * Parameters of NIXL's backend OBJ, such as `bucket`, `region` and `endpoint_override`. Those that
   * are missing, credentials too, are found as AWS's SDK finds them.
   */
  readonly parameters: Readonly<Record<string, string>>;
  /** All objects together are not longer. */
  readonly limitBytes: number;
}

/** Options of `openObjectDisk`. */
export interface ObjectDiskOptions extends ObjectStore {
  /** It must have NIXL's backend OBJ. The caller closes it. */
  readonly transport: Transport;
  /** Blocks are written from its slots and read into them. */
  readonly memory: Memory;
  /** Keys begin with it. Only one process may use it: a store has no lock. */
  readonly name: string;
  readonly blockLengthBytes: number;
}

/** Objects that one transfer reads or writes. */
const BATCH = 256;

/**
 * Opens blocks in an object store, through NIXL's backend OBJ: two objects each.
 * @throws `KV_CONFIG_INVALID` when the limit has no block, `KV_BACKEND_UNAVAILABLE` without the
 * backend or when the store does not take and give an object.
 */
export async function openObjectDisk(options: ObjectDiskOptions): Promise<Disk> {
  const { transport, memory, parameters, name, limitBytes, blockLengthBytes: length } = options;
  const places = Math.floor(limitBytes / (length + HEADER_BYTES));
  if (places < 1)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `objects of ${limitBytes} bytes have no block of ${length} bytes`,
      { hint: `a block takes ${length + HEADER_BYTES} bytes of the store` },
    );

  const agent = await transport.createAgent({ backends: [{ name: "OBJ", parameters }] });
  const keys = Array.from({ length: places }, (_, place) => `${name}/${place}`);
  const headerKeys = [...keys.map((key) => `${key}.header`), `${name}/places`, `${name}/probe`];
  const headerMemory = transport.allocate(headerKeys.length * HEADER_BYTES);
  const close = async () => {
    await agent.close();
    headerMemory.close();
  };
  try {
    await agent.register(memory);
    await agent.register(headerMemory);
    const slots = await slotsOf(agent, memory, length);
    const blocks = await objectsOf(agent, keys, length);
    const headers = new ObjectHeaders({
      agent,
      places,
      memory: headerMemory,
      slots: await slotsOf(agent, headerMemory, HEADER_BYTES),
      objects: await objectsOf(agent, headerKeys, HEADER_BYTES),
    });
    await headers.readAll();
    return {
      ...movedBlocks(agent, slots, blocks),
      header: (place) => headers.at(place),
      writeHeader: (place, bytes) => headers.write(place, bytes),
      // A store has an object for good when the WRITE ends.
      async sync() {},
      close,
    };
  } catch (error) {
    await close();
    throw error;
  }
}

async function objectsOf(
  agent: Agent,
  keys: readonly string[],
  lengthBytes: number,
): Promise<PreparedList> {
  const rows: number[] = [];
  for (const key of keys) {
    const object = objectMemory(key, { lengthBytes });
    await agent.register(object);
    rows.push(0, lengthBytes, object.deviceId, lengthBytes, 1);
  }
  return agent.prepareRemote(agent.name, { memoryType: "OBJ", rows: Float64Array.from(rows) });
}

interface ObjectHeadersParts {
  readonly agent: Agent;
  readonly places: number;
  /** The headers by place, then the number of places that have one, then a probe. */
  readonly memory: Memory;
  readonly slots: PreparedList;
  readonly objects: PreparedList;
}

class ObjectHeaders {
  readonly #parts: ObjectHeadersParts;

  constructor(parts: ObjectHeadersParts) {
    this.#parts = parts;
  }

  at(place: number): Uint8Array {
    return this.#parts.memory.view(place * HEADER_BYTES, HEADER_BYTES);
  }

  async write(place: number, bytes: Uint8Array): Promise<void> {
    this.at(place).set(bytes);
    await this.#move("WRITE", place, place + 1);
  }

  /** Places that no process has used so far get an empty header, so that each READ succeeds. */
  async readAll(): Promise<void> {
    const { places } = this.#parts;
    const known = await this.#knownPlaces();
    await this.#move("READ", 0, Math.min(known, places));
    if (known >= places) return;

    await this.#move("WRITE", known, places);
    await this.write(places, Buffer.from(String(places).padEnd(HEADER_BYTES)));
  }

  /**
   * NIXL does not tell an absent object from a store that fails. So the number counts as absent
   * only when the store takes and gives another object, and then still does not give this one.
   */
  async #knownPlaces(): Promise<number> {
    const { places: number } = this.#parts;
    const probe = number + 1;
    const read = async () => {
      await this.#move("READ", number, number + 1);
      return Number(Buffer.from(this.at(number)).toString());
    };
    try {
      return await read();
    } catch {
      try {
        await this.#move("WRITE", probe, probe + 1);
        await this.#move("READ", probe, probe + 1);
      } catch (cause) {
        throw new KvError("KV_BACKEND_UNAVAILABLE", "the object store does not keep an object", {
          hint: "check the bucket, its endpoint and region, and the credentials; NIXL's own log on stderr says more",
          cause,
        });
      }
      return read().catch(() => 0);
    }
  }

  async #move(operation: "READ" | "WRITE", first: number, end: number): Promise<void> {
    const { agent, slots, objects } = this.#parts;
    for (let from = first; from < end; from += BATCH) {
      const ids = Array.from({ length: Math.min(BATCH, end - from) }, (_, at) => from + at);
      await move(agent, operation, [slots, ids], [objects, ids]);
    }
  }
}
