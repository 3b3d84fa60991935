import { expect, test } from "vitest";
import { type Fixture, REMOTE_DECODE } from "./fixture.js";

export function happyPathTests(fixture: Fixture): void {
  const blocks = (count: number): number => count * fixture.decode.config.blockSize;

  test("a prompt computed on the prefill side arrives in the decode side's blocks, and both sides free their blocks afterwards", async () => {
    const prompt = await fixture.prefilled("cmpl-1", blocks(4), 1);
    const decode = fixture.decode;
    const request = decode.request("cmpl-1", blocks(4), prompt.params);
    decode.end.scheduler.requestQueued?.(request);
    expect(decode.end.scheduler.matchedTokens(request, 0)).toEqual({
      tokens: blocks(4),
      async: true,
    });
    const running = await fixture.received(prompt);
    expect([...decode.failed.values()]).toEqual([]);
    fixture.expectArrived(prompt, running);
    await fixture.freed("cmpl-1");
    expect(decode.finish(running, "stopped")).toBeUndefined();
    await fixture.expectIdle();
    expect(decode.failedBlockIds.size).toBe(0);
  });

  test("a prompt that does not fill its last block", async () => {
    const numTokens = blocks(2) + 1;
    const prompt = await fixture.prefilled("cmpl-2", numTokens, 2);
    const running = await fixture.received(prompt);
    fixture.expectArrived(prompt, running);
    fixture.decode.finish(running, "length");
    await fixture.expectIdle();
  });

  test("a local prefix hit: only the remaining blocks are transferred, and the first ones stay unchanged", async () => {
    const prompt = await fixture.prefilled("cmpl-3", blocks(5), 3);
    const decode = fixture.decode;
    const running = fixture.admitted(prompt, blocks(2));
    const first = running.blockIds.map((ids) => ids.slice(0, 2));
    decode.compute(first, 99);
    const before = first.flat().map((id) => decode.block(0, 0, id).slice());
    await fixture.arrived("cmpl-3");
    expect(first.flat().map((id) => decode.block(0, 0, id))).toEqual(before);
    if (fixture.pair.compare === undefined) fixture.expectArrived(prompt, running, blocks(2));
    decode.finish(running, "stopped");
    await fixture.expectIdle();
  });

  test("a full local hit: nothing is transferred, the request does not wait, and the prefill side frees its blocks", async () => {
    const prompt = await fixture.prefilled("cmpl-4", blocks(3), 4);
    const decode = fixture.decode;
    const running = fixture.admitted(prompt, blocks(3));
    decode.compute(running.blockIds, 44);
    const before = running.blockIds.flat().map((id) => decode.block(0, 0, id).slice());
    await fixture.freed("cmpl-4");
    expect(running.blockIds.flat().map((id) => decode.block(0, 0, id))).toEqual(before);
    decode.finish(running, "stopped");
    await fixture.expectIdle();
    expect(decode.received.has("cmpl-4")).toBe(false);
  });

  test("several requests at once, admitted in another order than computed, each receive their own bytes", async () => {
    const decode = fixture.decode;
    const prompts: Awaited<ReturnType<Fixture["prefilled"]>>[] = [];
    for (let index = 0; index < 8; index++) {
      prompts.push(
        await fixture.prefilled(`cmpl-many-${index}`, blocks(1 + (index % 3)), 10 + index),
      );
    }
    const running = [3, 0, 7, 1, 6, 2, 5, 4].map((index) => {
      const prompt = prompts[index] ?? expect.fail("no such prompt");
      return {
        prompt,
        entry: fixture.admitted(prompt),
      };
    });
    await fixture.arrived(...prompts.map(({ requestId }) => requestId));
    for (const { prompt, entry } of running) fixture.expectArrived(prompt, entry);
    expect([...decode.failed.values()]).toEqual([]);
    for (const { entry } of running) decode.finish(entry, "stopped");
    await fixture.expectIdle();
  });

  test("reused blocks carry the bytes of the later request", async () => {
    for (let round = 0; round < 6; round++) {
      const requestId = `cmpl-again-${round}`;
      const prompt = await fixture.prefilled(requestId, blocks(4), 20 + round);
      const running = await fixture.received(prompt);
      fixture.expectArrived(prompt, running);
      fixture.decode.finish(running, "stopped");
      await fixture.freed(requestId);
    }
    await fixture.expectIdle();
  });

  test("requests without remote parameters are not touched", async () => {
    for (const engine of [fixture.prefill, fixture.decode]) {
      for (const params of [undefined, {}, { do_remote_prefill: false, do_remote_decode: false }]) {
        const request = engine.request(`plain-${JSON.stringify(params)}`, blocks(2), params);
        const running = engine.admit(request, 0);
        expect(engine.end.scheduler.matchedTokens(request, 0)).toEqual({ tokens: 0, async: false });
        engine.compute(running.blockIds, 7);
        await fixture.rounds(2);
        expect(engine.finish(running, "stopped")).toBeUndefined();
        expect(engine.kept).toBe(0);
      }
    }
    await fixture.expectIdle();
  });

  test("onProgress fires when there is output to collect", async () => {
    const decode = fixture.decode;
    let progress = 0;
    for (const worker of decode.end.workers) worker.onProgress(() => progress++);
    const prompt = await fixture.prefilled("cmpl-progress", blocks(2), 5);
    const running = fixture.admitted(prompt);
    expect(progress).toBe(0);
    await fixture.arrived("cmpl-progress");
    expect(progress).toBeGreaterThanOrEqual(decode.end.workers.length);
    decode.finish(running, "stopped");
    await fixture.expectIdle();
  });

  test("a prompt with `do_remote_decode` takes nothing from a peer", async () => {
    const prefill = fixture.prefill;
    const request = prefill.request("cmpl-asks", blocks(1), REMOTE_DECODE);
    prefill.end.scheduler.requestQueued?.(request);
    expect(prefill.end.scheduler.matchedTokens(request, 0)).toEqual({ tokens: 0, async: false });
    const blockIds = prefill.takeBlocks(blocks(1));
    prefill.end.scheduler.afterAllocation(request, blockIds, 0);
    prefill.finish({ request, blockIds }, "aborted");
    await fixture.expectIdle();
  });
}
