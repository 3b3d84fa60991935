import type { Transport } from "@kv/interface";

/**
 * Places at which a process with NIXL may end. At `creating`, `registering`, `posted` and `closing`
 * the operation is in progress.
 */
export const PLACES = [
  "unused",
  "allocated",
  "creating",
  "created",
  "registering",
  "registered",
  "connected",
  "prepared",
  "posted",
  "transferred",
  "notified",
  "closing",
  "closed",
] as const;

export type Place = (typeof PLACES)[number];

const PAGE_BYTES = 4096;
const PAGES = 8192;

/**
 * Creates two agents, READs scattered pages between them, and closes both. It stops where the
 * caller stops iterating.
 */
async function* life(transport: Transport): AsyncGenerator<Place> {
  yield "unused";
  const [target, source] = [
    transport.allocate(PAGES * PAGE_BYTES),
    transport.allocate(PAGES * PAGE_BYTES),
  ];
  yield "allocated";
  const creating = [transport.createAgent(), transport.createAgent()] as const;
  yield "creating";
  const [reader, owner] = [await creating[0], await creating[1]];
  yield "created";
  const registering = [reader.register(target), owner.register(source)];
  yield "registering";
  const registrations = await Promise.all(registering);
  yield "registered";
  await reader.addRemote(await owner.localMetadata());
  yield "connected";
  const rows = (address: number) => Float64Array.of(address, PAGE_BYTES, 0, PAGE_BYTES, PAGES);
  const local = await reader.prepareLocal({ memoryType: "DRAM", rows: rows(target.address) });
  const remote = await reader.prepareRemote(owner.name, {
    memoryType: "DRAM",
    rows: rows(source.address),
  });
  yield "prepared";
  const ids = Int32Array.from({ length: PAGES }, (_, index) => (index * 2741) % PAGES);
  const transfer = reader.transfer({
    operation: "READ",
    local,
    localIds: ids,
    remote,
    remoteIds: ids,
  });
  yield "posted";
  await transfer.done;
  yield "transferred";
  await reader.notify(owner.name, new TextEncoder().encode("read"));
  yield "notified";
  const closing = (async () => {
    await local.close();
    await remote.close();
    for (const registration of registrations) await registration.close();
    await transport.close();
    for (const memory of [target, source]) memory.close();
  })();
  yield "closing";
  await closing;
  yield "closed";
}

/** Runs up to the place and leaves everything open. */
export async function liveUntil(transport: Transport, place: Place): Promise<void> {
  // Not `for await`: leaving that loop would end the generator.
  const steps = life(transport);
  for (let step = await steps.next(); step.done !== true && step.value !== place; )
    step = await steps.next();
}
