// Uses NIXL up to a place, writes 1 MiB to its stdout, and ends: how, is drawn from its two
// arguments, a seed and a number. The test bundles it.
import { isMainThread, parentPort, Worker, workerData } from "node:worker_threads";
import { nixlTransport } from "@kv/nixl";
import { seededRandom } from "@kv/transport-memory";

/** `return`: the event loop runs empty. `terminate`: the main thread terminates the worker. */
const ENDINGS = ["return", "exit", "terminate"] as const;

type Exit = ReturnType<typeof drawExit>;

function drawExit(seed: string, number: string) {
  const { integer } = seededRandom(`${seed} ${number}`);
  const anyOf = <T>(list: readonly T[]) => list[integer(list.length)] as T;
  const thread = anyOf(["main", "main", "worker"] as const);
  return {
    thread,
    place: integer(PLACES),
    ending: anyOf(thread === "main" ? ENDINGS.slice(0, 2) : ENDINGS),
    lingerMs: anyOf([0, 0, 1, 5, 20]),
    /** Loads UCX's InfiniBand module, which can crash a process at exit. */
    infiniband: anyOf([true, false]),
  };
}

const PAGE_BYTES = 4096;
const PAGES = 8192;

/** At `creating`, `registering`, `posted` and `closing` the operation is in progress. */
async function* life(): AsyncGenerator<string> {
  const transport = nixlTransport();
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
  const pagesAt = (address: number) => ({
    memoryType: "DRAM" as const,
    rows: Float64Array.of(address, PAGE_BYTES, 0, PAGE_BYTES, PAGES),
  });
  const local = await reader.prepareLocal(pagesAt(target.address));
  const remote = await reader.prepareRemote(owner.name, pagesAt(source.address));
  yield "prepared";
  const ids = Int32Array.from({ length: PAGES }, (_, index) => (index * 2741) % PAGES);
  const lists = { local, localIds: ids, remote, remoteIds: ids };
  const transfer = reader.transfer({ operation: "READ", ...lists });
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

const PLACES = 13;
const steps = life();

async function liveUntil(place: number) {
  for (let at = 0; at <= place; at += 1) await steps.next();
}

async function liveInWorker(exit: Exit): Promise<Worker> {
  const worker = new Worker(new URL(import.meta.url), { workerData: exit });
  await new Promise((resolve, reject) => worker.once("message", resolve).once("error", reject));
  return worker;
}

const write = () =>
  new Promise<void>((resolve) => process.stdout.write("x".repeat(1 << 20), () => resolve()));

async function endAs(exit: Exit) {
  process.stderr.write(`${JSON.stringify(exit)}\n`);
  if (exit.infiniband) process.env["UCX_MODULES"] = "^cuda";
  // process.exit() drops output that a pipe has not taken yet. In the other ends it is still being
  // written.
  if (exit.ending === "exit") await write();
  const worker = exit.thread === "worker" ? await liveInWorker(exit) : undefined;
  if (worker === undefined) await liveUntil(exit.place);
  await new Promise((resolve) => setTimeout(resolve, exit.lingerMs));
  if (exit.ending === "exit") process.exit(0);
  void write();
  if (exit.ending === "terminate") await worker?.terminate();
}

if (isMainThread) {
  const [seed = "", number = ""] = process.argv.slice(2);
  await endAs(drawExit(seed, number));
} else {
  const { place, ending } = workerData as Exit;
  await liveUntil(place);
  if (ending !== "return") setInterval(() => {}, 1000);
  parentPort?.postMessage("there");
}
