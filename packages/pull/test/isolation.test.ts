import type { KvTransferParams } from "@kv/interface";
import { encodeNotification, encodeRequestControl, newCapability } from "@kv/protocol";
import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import { memorySideChannel } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";

const plainDone = (requestId: string) =>
  encodeNotification({ kind: "done", requestId, readers: 1 });
const leaseOf = ({ kv_peer }: KvTransferParams) =>
  kv_peer as { incarnation: string; generation: number; capability: string };

describe("a client that writes kv_transfer_params itself", () => {
  it("is refused alone when another process than the one that it names has the address", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const rogue = await play.engine("rogue", { engineId: "p", plain: true });
    await play.prefilled(rogue, 8);
    const params = await play.prefilled(p);
    const victim = { remote_host: "rogue", remote_port: rogue.address.port };
    const forged = { ...params, ...victim, remote_registration_generation: 99 };
    const outcome = await play.outcome(d.decode({ ...prompt(1), requestId: "x", params: forged }));
    expect(outcome).toBe("KV_GENERATION_STALE");
    expect(await play.decoded(d, params)).toBe("ok");
    for (const n of [2, 3]) expect(await play.handedOver(p, d, n)).toBe("ok");
  });

  it("does not replace the open engine by naming a later registration of its cache", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    expect(await play.handedOver(p, d)).toBe("ok");
    const params = await play.prefilled(p, 2);
    const forged = { ...params, remote_registration_generation: 2 ** 50 };
    const outcome = await play.outcome(d.decode({ ...prompt(2), requestId: "x", params: forged }));
    expect(outcome).toBe("KV_GENERATION_STALE");
    expect(play.logged("d", "peer-dropped")).toEqual([]);
    expect(await play.decoded(d, params, 2)).toBe("ok");
  });

  it("does not put the real address into back-off with wrong sizes, ids or ports", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const params = await play.prefilled(p);
    const wrong = [
      { tp_size: 2 },
      { remote_engine_id: "q" },
      { remote_port: 9 },
      { pp_size: 2 },
      { dcp_size: 2 },
    ];
    for (const [index, change] of wrong.entries()) {
      const forged = { ...params, remote_request_id: "another", kv_peer: null, ...change };
      const requestId = `x${index}`;
      expect(await play.outcome(d.decode({ ...prompt(1), requestId, params: forged }))).not.toBe(
        "ok",
      );
    }
    expect(await play.decoded(d, params)).toBe("ok");
  });

  it("gets no other request's blocks under its own lease, held or freed", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const victim = await play.prefilled(p);
    const freed = await play.prefilled(p, 2);
    expect(await play.decoded(d, freed, 2)).toBe("ok");
    for (const [index, { remote_block_ids }] of [victim, freed].entries()) {
      const own = await play.clock.settle(p.prefill(prompt(10 + index)));
      const params = { ...own, remote_block_ids };
      expect(await play.outcome(d.decode({ ...prompt(10 + index), params }))).toBe(
        "KV_LEASE_EXPIRED",
      );
    }
    expect(await play.decoded(d, victim)).toBe("ok");
  });

  it("neither frees nor reads another request whose id it guesses", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const victim = await play.prefilled(p);
    const guessed = { ...victim, kv_peer: { ...leaseOf(victim), capability: newCapability() } };
    expect(await play.outcome(d.decode({ ...prompt(1), requestId: "x", params: guessed }))).toBe(
      "KV_LEASE_EXPIRED",
    );
    const empty = { ...guessed, remote_block_ids: [] };
    expect(await play.outcome(d.decode({ ...prompt(1), requestId: "y", params: empty }))).toBe(
      "KV_REQUEST_INVALID",
    );
    expect(await play.decoded(d, victim)).toBe("ok");
  });

  it("may name neither more blocks than the prompt has tokens nor a block twice", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const blockIds = [Array.from({ length: 500_000 }, (_, id) => id), [3, 4, 3]];
    for (const [index, ids] of blockIds.entries()) {
      const params = await play.prefilled(p, index);
      const forged = { ...params, remote_block_ids: [ids] };
      expect(await play.decoded(d, forged, index)).toBe("KV_REQUEST_INVALID");
    }
  });

  it("learns nothing about an address: the error is the same for a closed, a foreign and a silent port", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const prefilled = await play.clock.settle(
      Promise.all([1, 2, 3].map((n) => p.prefill(prompt(n)))),
    );
    const other = memorySideChannel({ network: play.network, host: "other" });
    await other.listen({ host: "other", port: 1, answer: () => undefined });
    await other.listen({
      host: "other",
      port: 2,
      answer: () => [new TextEncoder().encode("HTTP/1.1 400")],
    });
    const errors = new Set<string>();
    for (const remote_port of [1, 2, 3]) {
      const forged = { ...prefilled[remote_port - 1], remote_host: "other", remote_port };
      const decoded = d.decode({
        ...prompt(remote_port),
        requestId: `x${remote_port}`,
        params: forged,
      });
      const told = (error: { code: string; message: string }) => `${error.code} ${error.message}`;
      errors.add(await play.clock.settle(decoded.then(() => "ok", told)));
    }
    expect(errors.size).toBe(1);
    expect([...errors].join()).not.toMatch(/other|\d{2}/);
    expect(play.logged("d", "handshake_setup_failed")).toHaveLength(3);
    await other.close();
    await play.clock.advance(100_000);
  });
});

describe("a stranger that knows request ids", () => {
  it("frees and holds nothing where plain vLLM peers are refused", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair({ extra: { require_kv_peer: true } });
    const params = await play.prefilled(p);
    const stranger = await play.stranger("stranger", params);
    const capability = newCapability();
    const forged = [
      plainDone("r1"),
      encodeRequestControl({ kind: "done", requestId: "r1", readers: 1, capability }),
      encodeNotification({ kind: "heartbeat", requestIds: ["r1"] }),
      encodeRequestControl({ kind: "heartbeat", requests: [{ requestId: "r1", capability }] }),
    ];
    await play.clock.advance(25_000);
    for (const message of forged) await play.clock.settle(stranger.notify(message));
    await play.clock.advance(100);
    expect(p.outstanding().kept).toBe(1);
    await play.frees(p, 5000);
    expect(await play.handedOver(p, d, 2)).toBe("ok");
    await stranger.close();
  });

  it("frees nothing of a request whose consumer has proved itself, and is warned of where plain peers are accepted", async () => {
    await using play = createScenario();
    const p = await play.engine("p");
    const first = await play.prefilled(p);
    const second = await play.prefilled(p, 2);
    const stranger = await play.stranger("stranger", first);
    const { capability } = leaseOf(first);
    const proof = encodeRequestControl({
      kind: "heartbeat",
      requests: [{ requestId: "r1", capability }],
    });
    for (const message of [proof, plainDone("r1")])
      await play.clock.settle(stranger.notify(message));
    await play.clock.advance(100);
    expect(p.outstanding().kept).toBe(2);
    await play.clock.settle(stranger.notify(plainDone(String(second.remote_request_id))));
    await play.clock.advance(100);
    expect(p.outstanding().kept).toBe(1);
    expect(play.logged("p", "plain-peer-accepted")).toHaveLength(1);
    await stranger.close();
  });
});
