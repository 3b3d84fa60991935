// A TCP peer stops answering during READs. Reports the deadlines, the memory that stays in use, and
// whether close waits for the peer.
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { startPeer } from "../support/peer-process.js";

const env = { UCX_TLS: "tcp" };
const LENGTH = 4 << 20;
const backends = [process.env["NIXL_BACKEND"] ?? ""];
const owner = await startPeer(LENGTH, 1, { env, backends });
const transport = nixlTransport({ env, backends });
const agent = await transport.createAgent();
const memory = transport.allocate(LENGTH);
const registration = await agent.register(memory);
await agent.addRemote(owner.metadata);
const rows = (base: number) => Float64Array.of(base, 65_536, 0, 65_536, LENGTH / 65_536);
const local = await agent.prepareLocal({ memoryType: "DRAM", rows: rows(memory.address) });
const remote = await agent.prepareRemote(owner.name, {
  memoryType: "DRAM",
  rows: rows(owner.address),
});
const ids = Int32Array.from({ length: LENGTH / 65_536 }, (_, index) => index);
const request = { operation: "READ", local, localIds: ids, remote, remoteIds: ids } as const;
const code = (promise: Promise<unknown>) =>
  promise.then(
    () => "done",
    (error: unknown) => (KvError.is(error) ? error.code : String(error)),
  );
const report: Record<string, unknown> = { first: await code(agent.transfer(request).done) };

await owner.stop();
const controller = new AbortController();
const aborted = agent.transfer({ ...request, signal: controller.signal });
// Long enough for the transfer to start on a busy machine; one that has not started is released at
// once.
const timed = agent.transfer({ ...request, timeoutMs: 200, notification: Buffer.from("never") });
report.timed = await code(timed.done);
controller.abort();
report.aborted = await code(aborted.done);
let released = 0;
for (const transfer of [aborted, timed]) void transfer.released.then(() => released++);
let closed = false;
const closing = local.close().then(() => {
  closed = true;
});
// These calls pass through the agent's thread, so it polls in between.
for (let turn = 0; turn < 20; turn++) await agent.localMetadata();
report.releasedWhileStopped = released;
report.listClosedWhileStopped = closed;
report.registrationWhileStopped = await code(registration.close());

if (process.argv[2] === "resume") {
  owner.process.kill("SIGCONT");
  await Promise.all([aborted.released, timed.released]);
  await closing;
  await agent.notify(owner.name, Buffer.from("marker"));
  const { payload } = await owner.ask<{ payload: string }>("next");
  report.notification = Buffer.from(payload, "base64").toString();
  report.owner = await owner.end();
} else {
  await agent.close({ timeoutMs: 50 });
  await Promise.all([aborted.released, timed.released, closing]);
  report.inFlight = agent.telemetry().transfersInFlight;
  await owner.kill();
}
await transport.close();
memory.close();
process.stdout.write(JSON.stringify(report));
