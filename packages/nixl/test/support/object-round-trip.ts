import { nixlTransport, objectMemory } from "@kv/nixl";
import { fillPattern } from "./pattern.js";

const BLOCK = 65_536;

/**
 * Writes the object `kv/block` to a store at an HTTPS port of this host, `times` times, with a
 * transport that trusts only the certificate in `caBundle`, and reads it again. Resolves with
 * whether the same bytes came back each time.
 */
export async function objectRoundTrip(port: number, caBundle: string, times = 1): Promise<boolean> {
  const parameters = {
    endpoint_override: `https://127.0.0.1:${port}`,
    scheme: "https",
    ca_bundle: caBundle,
    bucket: "kv",
    region: "us-east-1",
    access_key: "any",
    secret_key: "any",
    req_checksum: "required",
  };
  await using transport = nixlTransport({ backends: [{ name: "OBJ", parameters }] });
  const agent = await transport.createAgent();
  using memory = transport.allocate(BLOCK);
  await agent.register(memory);
  const object = objectMemory("block", { lengthBytes: BLOCK });
  await agent.register(object);
  const rows = Float64Array.of(memory.address, BLOCK, 0, BLOCK, 1);
  const local = await agent.prepareLocal({ memoryType: "DRAM", rows });
  const remote = await agent.prepareRemote(agent.name, {
    memoryType: "OBJ",
    rows: Float64Array.of(0, BLOCK, object.deviceId, 0, 1),
  });
  const ids = Int32Array.of(0);
  const lists = { local, localIds: ids, remote, remoteIds: ids } as const;
  let same = true;
  try {
    for (let round = 0; round < times; round++) {
      fillPattern(memory.bytes, 5 + round);
      const written = Buffer.from(memory.bytes);
      await agent.transfer({ operation: "WRITE", ...lists }).done;
      memory.bytes.fill(0);
      await agent.transfer({ operation: "READ", ...lists }).done;
      same &&= written.equals(memory.bytes);
    }
    return same;
  } finally {
    await agent.close();
  }
}
