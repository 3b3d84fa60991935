// A TCP peer stops answering during READs. Reports the deadlines, the memory that stays in use, and
// whether close waits for the peer.
import { nixlTransport } from "@kv/nixl";
import { codeOf } from "../support/code-of.js";
import { listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
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
const COUNT = LENGTH / 65_536;
const { local, move } = await listsOf(agent, memory, owner.name, owner, 65_536, COUNT);
const read = (more = {}) => move("READ", scattered(COUNT), more);
const report: Record<string, unknown> = { first: await codeOf(read().done) };

await owner.stop();
const controller = new AbortController();
const aborted = read({ signal: controller.signal });
// Long enough for the transfer to start on a busy machine; one that has not started is released at
// once.
const timed = read({ timeoutMs: 200, notification: Buffer.from("never") });
report.timed = await codeOf(timed.done);
controller.abort();
report.aborted = await codeOf(aborted.done);
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
report.registrationWhileStopped = await codeOf(registration.close());

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
