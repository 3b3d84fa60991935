// The cost of checking a peer's metadata: rejecting damaged bytes in this process, and loading intact ones in another process first.
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { mutations } from "../packages/nixl/test/support/mutations.js";
import { percentile, type Row, spread } from "./report.js";

const DAMAGED = 2000;
const CHECKED = 21;
const REFUSAL_MS = 1;
const CHECK_MS = 150;

async function timed(work: () => Promise<unknown>): Promise<{ ms: number; refused: boolean }> {
  const begun = performance.now();
  const refused = await work().then(
    () => false,
    (error: unknown) => KvError.is(error, "KV_AGENT_METADATA_INVALID"),
  );
  return { ms: performance.now() - begun, refused };
}

export async function metadata(): Promise<readonly Row[]> {
  const owner = nixlTransport();
  const peer = await owner.createAgent();
  const page = () => owner.allocate(4096);
  const memories = [page()];
  await peer.register(memories[0] ?? page());

  const plain = nixlTransport();
  const agent = await plain.createAgent();
  const refusals: number[] = [];
  // Cut-off metadata never reaches NIXL: only the other process loads bytes that might crash it.
  for (const bytes of mutations(await peer.localMetadata(), DAMAGED, 1)) {
    const { ms, refused } = await timed(() => agent.addRemote(bytes.subarray(0, bytes.length - 1)));
    if (refused) refusals.push(ms);
  }
  await plain.close();

  const careful = nixlTransport({ checkMetadata: true });
  const checking = await careful.createAgent();
  // The first check waits for the other process to start.
  await checking.addRemote(await peer.localMetadata());
  const checks: number[] = [];
  for (let round = 0; round < CHECKED; round++) {
    // New bytes each time: bytes that were checked before are not loaded again.
    const memory = page();
    memories.push(memory);
    await peer.register(memory);
    const bytes = await peer.localMetadata();
    checks.push((await timed(() => checking.addRemote(bytes))).ms);
  }
  await careful.close();
  await owner.close();
  for (const memory of memories) memory.close();

  const row = (what: string, values: readonly number[], limit: number): Row => {
    const late = percentile(values, 0.99);
    return {
      what: `${what} (${values.length})`,
      ours: `${spread(values, "ms")}, p99 ${late.toPrecision(3)}`,
      theirs: "-",
      ratio: undefined,
      wanted: `median ≤ ${limit} ms`,
      met: percentile(values, 0.5) <= limit,
    };
  };
  return [
    row("damaged metadata rejected in this process", refusals, REFUSAL_MS),
    row("intact metadata checked in another process, then loaded", checks, CHECK_MS),
  ];
}
