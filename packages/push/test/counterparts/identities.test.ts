import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import { expect, it } from "vitest";
import { pushConnector } from "../../src/index.js";
import { OWN, withdrawal, writerOn } from "./writer-alone.js";

// One thing looks like another: requests, engines and processes of nearly equal names.

it("a registration by base id waits while another request of that base id may still finish with its prompt", async () => {
  const { writer, none, order, finish, register, idle, notified } = writerOn();
  const { expiresAtMs: _, ...running } = order("r-0000bbbb");
  writer.step({ ...none, inBatch: [running] });
  const own = { ...OWN, match_id: "r-0000cccc", prompt_digest: "0".repeat(64) };
  register("r-0000cccc", { kv_peer: own });
  finish("r-0000aaaa");
  await idle();
  expect([notified, writer.outstanding().registrations]).toEqual([[], 1]);
  finish("r-0000bbbb");
  await idle();
  expect([notified, writer.outstanding().registrations]).toEqual([["KV1:"], 0]);
});

it("a withdrawal that waits for its prompt comes after those that want its blocks", async () => {
  const { writer, finish, register, written, idle } = writerOn();
  writer.withdraw(withdrawal("r-0000aaaa"), "d agent");
  register("r-0000bbbb", { kv_peer: { ...OWN, match_id: "r-0000bbbb", generation: 2 } });
  finish("r-0000cccc");
  await idle();
  expect(written).toEqual(["r-0000cccc → r-0000bbbb [7,8,9]"]);
});

it("two engines of one id at two addresses have queues of their own", () => {
  const { finish, register, writer } = writerOn();
  register("a");
  register("b", { decode_host: "elsewhere" });
  register("c", { decode_port: 5601 });
  finish("a", "b", "c");
  expect(writer.outstanding().writeQueues).toBe(3);
});

it("P frees its blocks when a WRITE outlasts the lease and another rank of D never comes", async () => {
  let heard = 0;
  const play = createScenario({
    connector: pushConnector,
    faults: [
      // The first rank's registration arrives; no other word of D does.
      { fault: "drop", operation: "NOTIFY", from: "d", where: () => heard++ > 0 },
      { fault: "delay", operation: "WRITE", delayMs: 8000 },
    ],
  });
  const extra = { kv_lease_duration: 6, request_timeout: 15, decoder_kv_blocks_ttl: 20 };
  const { p, d } = await play.pair({ extra }, { extra, tpSize: 2 });
  const params = await play.prefilled(p, 1);
  const received = d.decode({ ...prompt(1), params });
  received.catch(() => {});
  await play.clock.advance(7000);
  expect(p.outstanding().kept).toBe(1);
  await play.frees(p, 2000);
  expect(await play.outcome(received)).toMatch(/^KV_/);
});
