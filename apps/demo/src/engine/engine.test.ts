import { memoryMetrics } from "@kv/connector";
import { KvError } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import { afterEach, describe, expect, it, vi } from "vitest";
import { arithmeticModel } from "../../test/support/arithmetic-model.js";
import {
  type ScriptedConnector,
  scriptedConnector,
} from "../../test/support/scripted-connector.js";
import { BlockPool } from "./cache/block-pool.js";
import { KvPool } from "./cache/kv-pool.js";
import { Engine, type EngineOptions } from "./engine.js";
import type { EngineRequest, EngineResult } from "./request.js";

const blockSize = 4;

/** Every engine closes at the end of its test, and holds no block that it does not keep for a peer. */
const open: { readonly engine: Engine; readonly blocks: BlockPool }[] = [];
afterEach(async () => {
  for (const { engine, blocks } of open.splice(0)) {
    await engine.close();
    if (engine.outstanding().kept === 0) expect(blocks.held).toBe(0);
  }
});

interface SetUpOptions extends Partial<Omit<EngineOptions, "model" | "pool" | "blocks">> {
  readonly connector?: ScriptedConnector;
  readonly numBlocks?: number;
  readonly tp?: number;
  readonly eos?: number[];
}

function setUp(given: SetUpOptions = {}) {
  const { connector, numBlocks = 64, eos = [], ...options } = given;
  const { tp = connector?.workers.length ?? 1, ...ofEngine } = options;
  const model = arithmeticModel({ eosTokenIds: eos });
  const geometry = model.config;
  const pool = new KvPool({ transport: memoryTransport(), geometry, numBlocks, blockSize, tp });
  const blocks = new BlockPool({ numBlocks });
  const engine = new Engine({ model, pool, blocks, connector, ...ofEngine });
  open.push({ engine, blocks });
  const submit = (
    requestId: string,
    promptTokens: readonly number[],
    maxTokens: number,
    more: Partial<EngineRequest> = {},
  ) => engine.submit({ requestId, promptTokens, maxTokens, ...more });
  return { model, pool, blocks, engine, submit };
}
type Setup = ReturnType<typeof setUp>;

const prompt = (length: number, seed = 1) =>
  Array.from({ length }, (_, i) => (i * i * 7 + seed * 31) % 990);
const ids = (result: EngineResult) => result.tokens;
const failure = (promise: Promise<unknown>) =>
  promise.then(
    () => "no error",
    (error: unknown) => (KvError.is(error) ? error.code : String(error)),
  );

/**
 * Writes the KV of the prompt into the blocks that were given to the connector, as a peer would.
 */
async function deliver(
  { model, pool }: Setup,
  connector: ScriptedConnector,
  requestId: string,
  promptTokens: readonly number[],
): Promise<void> {
  const there = connector.allocated.get(requestId);
  const { newKv } = await model.forward({
    sequenceId: "peer",
    tokens: Int32Array.from(promptTokens),
    position: 0,
  });
  if (typeof newKv === "function") throw new Error("this model gives its KV whole");
  await model.dropSequence("peer");
  await pool.write({ blockIds: there?.blockIds ?? [], from: 0, count: promptTokens.length }, newKv);
}

const withScheduler = (
  connector: ScriptedConnector,
  scheduler: Partial<ScriptedConnector["scheduler"]>,
) => ({ ...connector, scheduler: { ...connector.scheduler, ...scheduler } });

/** Lets all pending microtasks and callbacks run. */
const settled = () => new Promise((resolve) => setTimeout(resolve, 0));

describe("a prefill whose last tokens are the decode engine's", () => {
  it("vllm#37310: computes no more tokens of the prompt than the connector says, and one token of output", async () => {
    const connector = scriptedConnector();
    const asked: number[] = [];
    const tokensToPrefill = ({ numPromptTokens }: { readonly numPromptTokens: number }) => {
      asked.push(numPromptTokens);
      return numPromptTokens - 1;
    };
    const { submit } = setUp({ connector: withScheduler(connector, { tokensToPrefill }) });
    const kvTransferParams = { do_remote_decode: true };
    expect(ids(await submit("r", prompt(9), 5, { kvTransferParams }).done)).toHaveLength(1);
    expect(asked).toEqual([9]);
    // Two blocks of four tokens hold the eight that were computed.
    expect(connector.allocated.get("r")?.blockIds).toHaveLength(2);
  });
});

describe("metrics of the sources of a prompt's KV, under vLLM's names", () => {
  it("count computed tokens, those of the prefix cache, and a peer's by the connector's source", async () => {
    const connector = scriptedConnector();
    const metrics = memoryMetrics();
    const set = setUp({
      connector: withScheduler(connector, { cacheHitSource: () => "p2p" }),
      metrics,
    });
    await set.submit("a", prompt(10), 1).done;
    const kvTransferParams = { remote_tokens: 14 };
    const { done } = set.submit("b", prompt(14), 1, { kvTransferParams });
    await expect.poll(() => connector.allocated.has("b")).toBe(true);
    await deliver(set, connector, "b", prompt(14));
    connector.received("b");
    await done;
    const counted = (name: string, source: string) =>
      new RegExp(`^vllm:${name}(?:_total)?\\{source="${source}"\\} (\\d+)$`, "m").exec(
        metrics.render(),
      )?.[1];
    expect(
      ["device", "host", "p2p", "disk", "external_unspecified"].map((source) =>
        counted("prompt_tokens_cached_by_source", source),
      ),
    ).toEqual(["8", "0", "6", "0", "0"]);
    expect(
      ["local_compute", "local_cache_hit", "external_kv_transfer"].map((source) =>
        counted("prompt_tokens_by_source", source),
      ),
    ).toEqual(["10", "8", "6"]);
  });
});

describe("P's first token", () => {
  it.each([1, 6])(
    "vllm#51919: with %i tokens of output the model runs once less, and the tokens are those of one engine",
    async (maxTokens) => {
      const expected = arithmeticModel().generate(prompt(10), maxTokens);
      const connector = scriptedConnector();
      const firstToken = () => expected[0];
      const set = setUp({ connector: withScheduler(connector, { firstToken }) });
      const told: number[] = [];
      const kvTransferParams = { remote_tokens: 10 };
      const onToken = (token: number) => void told.push(token);
      const { done } = set.submit("b", prompt(10), maxTokens, { kvTransferParams, onToken });
      await expect.poll(() => connector.allocated.has("b")).toBe(true);
      await deliver(set, connector, "b", prompt(10));
      const passes = vi.spyOn(set.model, "forward");
      connector.received("b");
      expect(ids(await done)).toEqual(expected);
      expect(told).toEqual(expected);
      expect(passes).toHaveBeenCalledTimes(maxTokens - 1);
    },
  );
});

describe("a connector with pending work", () => {
  it("steps again at once, and pauses before further steps", async () => {
    const connector = scriptedConnector();
    const delays: number[] = [];
    const { submit } = setUp({
      connector: withScheduler(connector, { hasPendingWork: () => true }),
      // The timers of this clock never fire.
      clock: {
        now: () => 0,
        setTimer: (_, delayMs) => ({ cancel() {}, at: delays.push(delayMs) }),
      },
    });
    await submit("r", prompt(5), 1).done;
    await expect.poll(() => delays).toEqual([1]);
    expect(connector.calls.filter((call) => call === "buildStepMetadata")).toHaveLength(2);
  });
});

describe("an engine on its own", () => {
  it.each([1, 2, 4])("generates the model's tokens for concurrent requests, TP %i", async (tp) => {
    const { engine, model, blocks, submit } = setUp({ tp });
    const results = await Promise.all(
      [3, 4, 9, 17, 30].map((length) => submit(`r${length}`, prompt(length), 6).done.then(ids)),
    );
    expect(results).toEqual([3, 4, 9, 17, 30].map((length) => model.generate(prompt(length), 6)));
    await engine.close();
    expect(blocks.held).toBe(0);
    expect(model.sequences).toBe(0);
  });

  it("computes only the part of a prompt that is not in the prefix cache, from the KV in the pool", async () => {
    const { model, submit } = setUp();
    await submit("a", prompt(14), 1).done;
    const longer = [...prompt(14), 5, 6, 7];
    const result = await submit("b", longer, 3).done;
    expect(result.cachedTokens).toBe(12);
    expect(model.calls.find((call) => call.sequenceId === "b")).toMatchObject({
      position: 12,
      pastTokens: 12,
    });
    expect(ids(result)).toEqual(model.generate(longer, 3));
  });

  it("computes the last token of a prompt that is completely cached", async () => {
    const { model, submit } = setUp();
    for (const requestId of ["a", "b"]) await submit(requestId, prompt(8), 1).done;
    expect(model.calls.at(-1)).toMatchObject({
      sequenceId: "b",
      position: 4,
      tokens: prompt(8).slice(4),
    });
  });

  it("finds prompt and output of a turn as the prefix of the next", async () => {
    const { model, submit } = setUp();
    const first = await submit("a", prompt(6), 7).done;
    const next = [...prompt(6), ...ids(first), 3];
    const second = await submit("b", next, 2).done;
    expect(second.cachedTokens).toBe(12);
    expect(ids(second)).toEqual(model.generate(next, 2));
  });

  it("stops at an end-of-sequence token unless ignoreEos is set, and always at stop tokens", async () => {
    const tokens = arithmeticModel().generate(prompt(5), 6);
    const eos = tokens[2] ?? 0;
    const { submit } = setUp({ eos: [eos] });
    const ended = async (requestId: string, more?: Partial<EngineRequest>) => {
      const result = await submit(requestId, prompt(5), 6, more).done;
      return [ids(result), result.finishReason];
    };
    const ignoreEos = true;
    const stopTokenIds = [tokens[4] ?? 0];
    expect(await ended("a")).toEqual([tokens.slice(0, 3), "stop"]);
    expect(await ended("b", { ignoreEos })).toEqual([tokens, "length"]);
    expect(await ended("c", { ignoreEos, stopTokenIds })).toEqual([tokens.slice(0, 5), "stop"]);
  });

  it("queues requests in order until there is room, and runs all of them", async () => {
    const { submit, model } = setUp({ numBlocks: 7 });
    const order: string[] = [];
    const results = await Promise.all(
      Array.from({ length: 6 }, async (_, i) => {
        const result = await submit(`r${i}`, prompt(10, i), 4).done;
        order.push(`r${i}`);
        return ids(result);
      }),
    );
    expect(results).toEqual(Array.from({ length: 6 }, (_, i) => model.generate(prompt(10, i), 4)));
    expect(order).toEqual(["r0", "r1", "r2", "r3", "r4", "r5"]);
  });

  it("does not let small requests overtake one that waits for blocks", async () => {
    const { submit } = setUp({ numBlocks: 9 });
    const order: string[] = [];
    const send = (requestId: string, length: number, maxTokens: number) =>
      submit(requestId, prompt(length, length), maxTokens).done.then(() => order.push(requestId));
    await Promise.all([send("first", 8, 20), send("large", 28, 4), send("small", 3, 1)]);
    expect(order).toEqual(["first", "large", "small"]);
  });

  it("releases a cached prefix when there is no room for the rest", async () => {
    const { submit } = setUp({ numBlocks: 9 });
    await submit("a", prompt(9), 1).done;
    const long = submit("b", prompt(20, 2), 8);
    // It shares a prefix with the first request and fits when the second has ended.
    const last = submit("c", [...prompt(9), ...prompt(9, 3)], 6);
    await Promise.all([long.done, last.done]);
  });

  it("refuses requests that can never run, each with its code", async () => {
    const { engine } = setUp({ numBlocks: 4 });
    const submit = (request: Partial<EngineRequest>) => {
      try {
        engine.submit({ requestId: "x", promptTokens: [1], maxTokens: 1, ...request });
        return "accepted";
      } catch (error) {
        return KvError.is(error) ? error.code : error;
      }
    };
    expect(submit({ promptTokens: [] })).toBe("KV_REQUEST_INVALID");
    expect(submit({ promptTokens: [997] })).toBe("KV_REQUEST_INVALID");
    expect(submit({ maxTokens: 0 })).toBe("KV_REQUEST_INVALID");
    expect(submit({ promptTokens: prompt(500), maxTokens: 13 })).toBe("KV_REQUEST_INVALID");
    expect(submit({ promptTokens: prompt(12), maxTokens: 2 })).toBe("KV_OUT_OF_BLOCKS");
    expect(submit({ promptTokens: prompt(12), maxTokens: 1 })).toBe("accepted");
    expect(submit({})).toBe("KV_REQUEST_INVALID");
    await engine.close();
    expect(submit({ requestId: "late" })).toBe("KV_ENGINE_FAILED");
  });

  it("fails only the request whose step fails", async () => {
    const { model, submit } = setUp();
    model.before = async ({ sequenceId }) => {
      if (sequenceId === "bad") throw new Error("scripted");
    };
    const bad = submit("bad", prompt(5), 3);
    const good = submit("good", prompt(5), 3);
    expect(await failure(bad.done)).toBe("KV_ENGINE_FAILED");
    expect(ids(await good.done)).toEqual(model.generate(prompt(5), 3));
  });

  it("aborts a waiting and a running request; close aborts the others", async () => {
    const { engine, submit } = setUp({ numBlocks: 4 });
    const running = submit("running", prompt(8), 4, { onToken: () => running.abort() });
    const waiting = submit("waiting", prompt(8), 4);
    waiting.abort("tired");
    expect(await failure(waiting.done)).toBe("KV_REQUEST_ABORTED");
    expect(await failure(running.done)).toBe("KV_REQUEST_ABORTED");
    const last = submit("last", prompt(8), 4);
    const outcome = failure(last.done);
    await engine.close();
    expect(await outcome).toBe("KV_REQUEST_ABORTED");
  });

  it.each([1, 2, 3])(
    "computes at most %i batches at the same time",
    async (maxConcurrentBatches) => {
      const { submit, model } = setUp({ maxConcurrentBatches });
      const waiting = new Map<string, () => void>();
      model.before = ({ sequenceId, position }) =>
        position > 0
          ? Promise.resolve()
          : new Promise<void>((resolve) => void waiting.set(sequenceId, resolve));
      const names = ["a", "b", "c", "d"];
      // Each of these prompts is a batch of its own.
      const results = names.map((name, i) => submit(name, prompt(9, i), 3).done.then(ids));
      for (const [begun, name] of names.entries()) {
        await expect.poll(() => waiting.has(name)).toBe(true);
        await settled();
        expect(waiting.size).toBe(Math.min(begun + maxConcurrentBatches, names.length));
        waiting.get(name)?.();
      }
      expect(await Promise.all(results)).toEqual(
        names.map((_, i) => model.generate(prompt(9, i), 3)),
      );
    },
  );

  it("keeps the blocks of an aborted request until its batch has ended, and goes on with other batches", async () => {
    const { model, blocks, submit } = setUp({ maxConcurrentBatches: 2 });
    let end = () => {};
    model.before = async ({ sequenceId }) => {
      if (sequenceId !== "slow") return;
      await new Promise<void>((resolve) => {
        end = resolve;
      });
    };
    const slow = submit("slow", prompt(9), 3);
    await expect.poll(() => model.calls.length).toBe(1);
    slow.abort();
    const other = submit("other", prompt(9, 2), 3);
    expect(ids(await other.done)).toEqual(model.generate(prompt(9, 2), 3));
    await expect.poll(() => blocks.held).toBe(3);
    end();
    expect(await failure(slow.done)).toBe("KV_REQUEST_ABORTED");
  });

  it("computes a prompt in chunks within the token budget, and another request's output in the same steps", async () => {
    const { model, submit } = setUp({ maxNumBatchedTokens: 8 });
    const running = submit("short", prompt(3), 6);
    const long = submit("long", prompt(26, 2), 3);
    expect(ids(await running.done)).toEqual(model.generate(prompt(3), 6));
    expect(ids(await long.done)).toEqual(model.generate(prompt(26, 2), 3));
    const steps = model.calls.map(({ sequenceId, position, tokens }) => [
      sequenceId,
      position,
      tokens.length,
    ]);
    expect(steps).toEqual([
      ["short", 0, 3],
      // The budget of 8 tokens is shared with one token of the other request.
      ["short", 3, 1],
      ["long", 0, 7],
      ["short", 4, 1],
      ["long", 7, 7],
      ["short", 5, 1],
      ["long", 14, 7],
      ["short", 6, 1],
      ["long", 21, 5],
      ["short", 7, 1],
      ["long", 26, 1],
      ["long", 27, 1],
    ]);
  });

  it("finds the chunks of a prompt in the prefix cache before the prompt is complete", async () => {
    const { submit, model } = setUp({ maxNumBatchedTokens: 8 });
    model.before = async ({ position }) => {
      if (position === 16) throw new Error("the third chunk fails");
    };
    expect(await failure(submit("a", prompt(26), 2).done)).toBe("KV_ENGINE_FAILED");
    model.before = async () => {};
    const result = await submit("b", prompt(26), 2).done;
    expect(result.cachedTokens).toBe(16);
    expect(ids(result)).toEqual(model.generate(prompt(26), 2));
  });

  it("samples the same tokens from the same seed", async () => {
    const { submit, model } = setUp();
    const run = (requestId: string, seed: number, temperature = 2) =>
      submit(requestId, prompt(5), 8, { sampling: { temperature, seed } }).done.then(ids);
    const [a, b, c] = [await run("a", 1), await run("b", 1), await run("c", 2)];
    expect(a).toEqual(b);
    expect(a).not.toEqual(c);
    expect(await run("cold", 1, 0.01)).toEqual(model.generate(prompt(5), 8));
  });
});

describe("a decode engine", () => {
  /** An engine that waits for the KV of the first tokens of a request. */
  async function receiving(
    given: Parameters<typeof scriptedConnector>[0] & Pick<SetUpOptions, "hooks"> = {},
    {
      promptTokens = prompt(10),
      remote = promptTokens.length,
      before = [],
    }: { promptTokens?: number[]; remote?: number; before?: number[] } = {},
  ) {
    const connector = scriptedConnector(given);
    const setup = setUp({ connector, hooks: given.hooks });
    if (before.length > 0) await setup.submit("before", before, 1).done;
    const kvTransferParams = { remote_tokens: remote };
    const handle = setup.submit("d", promptTokens, 5, { kvTransferParams });
    await settled();
    const arrive = () => deliver(setup, connector, "d", promptTokens.slice(0, remote));
    return { ...setup, connector, handle, arrive };
  }

  it("uses the received KV and computes only the last prompt token", async () => {
    const { connector, handle, engine, model, arrive } = await receiving({ ranks: 2 });
    expect(engine.outstanding()).toMatchObject({ remote: 1, running: 0 });
    // The connector gets the three blocks of the prompt, not the one for the output.
    expect(connector.allocated.get("d")).toMatchObject({ externalTokens: 10 });
    expect(connector.allocated.get("d")?.blockIds).toHaveLength(3);
    await arrive();
    connector.report(0, { finishedReceiving: ["d"] });
    await settled();
    expect(engine.outstanding()).toMatchObject({ remote: 1, partlyReported: 1 });
    connector.report(1, { finishedReceiving: ["d"] });
    const result = await handle.done;
    expect(ids(result)).toEqual(model.generate(prompt(10), 5));
    expect(result.remoteTokens).toBe(10);
    const own = model.calls.find((call) => call.sequenceId === "d");
    expect(own).toMatchObject({ tokens: prompt(10).slice(9), position: 9, pastTokens: 9 });
  });

  it("generates other tokens from other KV", async () => {
    let damage = async (_: readonly number[]) => {};
    const { pool, connector, handle, arrive, model, submit } = await receiving({
      hooks: {
        async afterReceive({ blockIds }) {
          await damage(blockIds);
          return { damaged: true };
        },
      },
    });
    damage = (blockIds) => pool.zeroBlock(blockIds[1] ?? 0);
    await arrive();
    connector.received("d");
    expect(ids(await handle.done)).not.toEqual(model.generate(prompt(10), 5));
    // No other request gets the damaged blocks.
    const next = await submit("e", prompt(10), 5).done;
    expect([next.cachedTokens, ids(next)]).toEqual([0, model.generate(prompt(10), 5)]);
  });

  it("keeps KV that no P compared with its prompt, and what it computes after it, out of the prefix cache", async () => {
    for (const unverified of [false, true]) {
      const { connector, handle, submit, arrive } = await receiving();
      await arrive();
      // One rank says so.
      connector.report(0, {
        finishedReceiving: ["d"],
        ...(unverified ? { unverifiedReceiving: ["d"] } : {}),
      });
      connector.report(1, { finishedReceiving: ["d"] });
      const { tokens } = await handle.done;
      const longer = [...prompt(10), ...tokens];
      const next = await submit("e", longer, 1).done;
      expect(next.cachedTokens > 0).toBe(!unverified);
    }
  });

  it("receives only the part of a prompt that is not in the prefix cache", async () => {
    const promptTokens = [...prompt(9), 7, 8];
    const { connector, handle, model, arrive } = await receiving(
      {},
      { promptTokens, before: prompt(9) },
    );
    expect(connector.calls).toContain("matchedTokens d 8");
    expect(connector.allocated.get("d")).toMatchObject({ externalTokens: 3 });
    expect(connector.allocated.get("d")?.blockIds).toHaveLength(3);
    await arrive();
    connector.received("d");
    const result = await handle.done;
    expect([result.cachedTokens, result.remoteTokens]).toEqual([8, 3]);
    expect(ids(result)).toEqual(model.generate(promptTokens, 5));
  });

  it("computes the part of a prompt that the peer does not have", async () => {
    const { connector, handle, model, arrive } = await receiving(
      {},
      { promptTokens: prompt(11), remote: 8 },
    );
    expect(connector.allocated.get("d")?.blockIds).toHaveLength(2);
    await arrive();
    connector.received("d");
    expect(ids(await handle.done)).toEqual(model.generate(prompt(11), 5));
  });

  it.each(["fail", "recompute"] as const)(
    "follows the policy when the KV did not arrive: %s",
    async (policy) => {
      const options = { ranks: 2, loadFailurePolicy: policy };
      const { connector, handle, engine, model } = await receiving(options);
      const outcome = handle.done.then(ids, (error: unknown) =>
        KvError.is(error) ? [error.code, error.message] : error,
      );
      const failed = {
        requestId: "d",
        code: "KV_HANDSHAKE_INCOMPATIBLE" as const,
        message: "no",
        failureType: "handshake_failed",
      };
      connector.report(0, { failedReceiving: [failed], finishedReceiving: ["d"] });
      await settled();
      // The other rank may still write.
      expect(engine.outstanding()).toMatchObject({ remote: 1 });
      connector.report(1, { finishedReceiving: ["d"] });
      expect(await outcome).toEqual(
        policy === "fail" ? ["KV_HANDSHAKE_INCOMPATIBLE", "no"] : model.generate(prompt(10), 5),
      );
    },
  );

  it("fails a request whose hook fails, and continues", async () => {
    const hooks = { afterReceive: () => Promise.reject(new Error("scripted")) };
    const { connector, handle, model, submit } = await receiving({ hooks });
    const outcome = failure(handle.done);
    connector.received("d");
    expect(await outcome).toBe("KV_ENGINE_FAILED");
    const next = await submit("e", prompt(4), 2).done;
    expect(ids(next)).toEqual(model.generate(prompt(4), 2));
  });

  it("a failed block fails its request", async () => {
    const { connector, handle } = await receiving();
    const outcome = failure(handle.done);
    connector.report(0, { failedBlockIds: [connector.allocated.get("d")?.blockIds[2] ?? 0] });
    connector.report(0, { finishedReceiving: ["d"] });
    expect(await outcome).toBe("KV_TRANSFER_FAILED");
  });

  it("keeps the blocks of an aborted request until no rank writes into them", async () => {
    const { connector, handle, engine, blocks } = await receiving({ ranks: 2 });
    handle.abort();
    expect(await failure(handle.done)).toBe("KV_REQUEST_ABORTED");
    expect(connector.finished.get("d")?.reason).toBe("aborted");
    await settled();
    expect(blocks.held).toBe(4);
    connector.report(0, { finishedReceiving: ["d"] });
    await settled();
    expect(blocks.held).toBe(4);
    connector.report(1, { finishedReceiving: ["d"] });
    await engine.idle();
  });

  it("ends a request that the connector refuses, with the connector's error", async () => {
    const connector = scriptedConnector();
    const { submit } = setUp({ connector });
    const handle = submit("d", prompt(10), 5, { kvTransferParams: { refused: true } });
    expect(await failure(handle.done)).toBe("KV_REQUEST_INVALID");
    expect(connector.finished.get("d")).toEqual({ reason: "error", blockIds: [] });
  });
});

describe("a prefill engine", () => {
  it("keeps the blocks of the prompt until every rank reports them as sent, and zeroes their tail", async () => {
    const connector = scriptedConnector({ ranks: 2 });
    let digests: string[] = [];
    const setup = setUp({
      connector,
      hooks: {
        async beforeSend({ blockIds, numComputedTokens: count }) {
          digests = await setup.pool.digests({ blockIds, from: 0, count });
        },
      },
    });
    const { engine, pool, blocks } = setup;
    // Leftovers of other requests in every block.
    for (const { regions } of pool.caches)
      for (const { memory } of regions) memory.bytes.fill(0x41);
    const request = {
      requestId: "p",
      promptTokens: prompt(10),
      maxTokens: 1,
      kvTransferParams: { keep: true },
    };
    const result = await engine.submit(request).done;
    expect(result.kvTransferParams).toEqual({ remote_request_id: "p" });
    const blockIds = connector.finished.get("p")?.blockIds ?? [];
    expect(blockIds).toHaveLength(3);
    expect(await pool.digests({ blockIds, from: 0, count: 10 })).toEqual(digests);
    expect(
      new Float32Array(await pool.read({ blockIds, from: 10, count: 2 })).every((v) => v === 0),
    ).toBe(true);
    connector.report(0, { finishedSending: ["p"] });
    await settled();
    expect([blocks.held, engine.outstanding().kept]).toEqual([3, 1]);
    expect(() => engine.submit(request)).toThrow(/another request has this id/);
    connector.report(1, { finishedSending: ["p"] });
    await engine.idle();
  });

  it.each([1, 2, 4])(
    "reports the layers of a prompt in chunks, each with the tokens that it holds, with %i ranks",
    async (ranks) => {
      const connector = scriptedConnector({ ranks });
      const reports: (readonly [readonly string[], unknown])[] = [];
      for (const worker of connector.workers) {
        worker.layerComputed = ({ regions, computedTokens }) =>
          void reports.push([regions, computedTokens]);
      }
      const { model, submit } = setUp({ connector, maxNumBatchedTokens: 8, reportLayers: true });
      await submit("p", prompt(17), 1).done;
      // The last chunk has a single token, and completes the layers.
      expect(new Set(reports.map(([, computed]) => JSON.stringify(computed)))).toEqual(
        new Set(['{"p":8}', '{"p":16}', '{"p":17}']),
      );
      expect(reports).toHaveLength(3 * 2 * ranks);
      // Their KV is in the pool.
      const longer = [...prompt(17), 5];
      expect(ids(await submit("q", longer, 2).done)).toEqual(model.generate(longer, 2));
    },
  );

  it("releases unused room for output at once", async () => {
    const eos = arithmeticModel().generate(prompt(5), 1)[0] ?? 0;
    const connector = scriptedConnector();
    const { engine, blocks, submit } = setUp({ connector, eos: [eos] });
    await submit("p", prompt(5), 20, { kvTransferParams: { keep: true } }).done;
    expect(blocks.held).toBe(2);
    connector.sent("p");
    await engine.idle();
  });

  it("calls the connector in the order of the contract, with one more step after the end", async () => {
    const connector = scriptedConnector();
    const { submit } = setUp({ connector });
    await submit("p", prompt(5), 1, { kvTransferParams: { keep: true } }).done;
    await settled();
    expect(connector.calls).toEqual([
      "matchedTokens p 0",
      "afterAllocation p",
      "buildStepMetadata",
      "startLoad 0",
      "waitForSave 0",
      "collectFinished 0",
      "requestFinished p length",
      "applyWorkerOutput",
      "buildStepMetadata",
      "startLoad 0",
      "waitForSave 0",
      "collectFinished 0",
      "applyWorkerOutput",
    ]);
  });
});
