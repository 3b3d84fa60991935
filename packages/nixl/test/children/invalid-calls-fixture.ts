import { KvError, type KvErrorCode } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";

export const transport = nixlTransport({ backends: [process.env["NIXL_BACKEND"] ?? ""] });
export const LENGTH = 1 << 20;

/** Requires that the call ends in a KvError with one of these codes. */
export async function refused(act: () => unknown, ...codes: KvErrorCode[]): Promise<void> {
  try {
    await act();
  } catch (error) {
    if (KvError.is(error) && codes.includes(error.code)) return;
    throw error;
  }
  throw new Error(`expected ${codes.join(" or ")} of ${act}`);
}

/** Two agents with prepared lists, and the request of a transfer between them. */
export async function pair() {
  const [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
  const [target, source] = [transport.allocate(LENGTH), transport.allocate(LENGTH)];
  source.bytes.fill(9);
  const registration = await reader.register(target);
  await owner.register(source);
  await reader.addRemote(await owner.localMetadata());
  const table = (base: number, ...row: number[]) => ({
    memoryType: "DRAM" as const,
    rows: Float64Array.of(base, ...(row.length > 0 ? row : [1024, 0, 1024, LENGTH / 1024])),
  });
  const local = await reader.prepareLocal(table(target.address));
  const remote = await reader.prepareRemote(owner.name, table(source.address));
  const ids = Int32Array.of(0, 1, 2);
  const request = { operation: "READ", local, localIds: ids, remote, remoteIds: ids } as const;
  /** Requires that the agents still work. */
  const works = async () => {
    await reader.transfer(request).done;
    if (target.bytes[0] !== 9) throw new Error("the READ did not arrive");
  };
  return { reader, owner, target, source, registration, local, remote, request, table, works };
}
