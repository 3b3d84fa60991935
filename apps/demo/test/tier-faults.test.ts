import { spawn } from "node:child_process";
import { once } from "node:events";
import { open, readdir } from "node:fs/promises";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { manualClock } from "@kv/testing/manual-clock";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { bundled } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { memoryNetwork } from "@kv/transport-memory";
import { describe, expect, it, onTestFinished, vi } from "vitest";
import { tierMember, transportOf } from "./support/tier-member.js";
import { PROMPT } from "./support/tier-prompt.js";

// Whatever becomes of a source, the answer is that of an engine that computes the prompt.

const CHILD = fileURLToPath(new URL("support/ending-pool.ts", import.meta.url));
const ALL = 48;

async function endingPool(...args: readonly string[]) {
  const child = spawn(process.execPath, [await bundled(CHILD), ...args], {
    stdio: ["pipe", "pipe", "inherit"],
  });
  const exited = once(child, "exit");
  const line = once(createInterface({ input: child.stdout }), "line");
  const [peer] = (await Promise.race([line, exited])) as [string];
  const end = async () => {
    child.stdin.end();
    return (await exited) as [code: number | null, signal: NodeJS.Signals | null];
  };
  onTestFinished(async () => void (await end()));
  return { peer, exited, end };
}

describe.skipIf(nixlMissing !== undefined)("a pool of another process, over NIXL", () => {
  const member = () => tierMember({ transport: transportOf("NIXL") });

  it.each([
    ["politely", "look-up", ALL],
    ["politely", "fetch", ALL],
    ["politely", "transfer", ALL],
    ["by force", "look-up", 0],
    ["by force", "fetch", 0],
    ["by force", "transfer", 0],
  ] as const)("that ends %s at a %s: the answer is right", async (how, phase, cachedTokens) => {
    const one = await member();
    const pool = await endingPool(JSON.stringify(one.tier.namespace), phase, how);
    const answer = await one.ask(pool.peer).done;
    expect(answer).toMatchObject({ tokens: one.model.generate(PROMPT, 4), cachedTokens });
    expect(await pool.exited).toEqual(how === "politely" ? [0, null] : [null, "SIGKILL"]);
    // The engine serves, and fetches from another.
    const next = await endingPool(JSON.stringify(one.tier.namespace), "never", "politely");
    const other = await member();
    expect(await other.ask(next.peer).done).toMatchObject({ cachedTokens: ALL });
    expect(await one.ask(next.peer).done).toMatchObject({ tokens: answer.tokens });
    expect(one.engine.outstanding()).toMatchObject({ waiting: 0, blocks: 0, servedBlocks: 0 });
  });

  it("whose file was damaged: it brings what comes before the damage", async () => {
    const folder = scratchFolder(onTestFinished);
    const one = await member();
    const first = await endingPool(
      JSON.stringify(one.tier.namespace),
      "never",
      "politely",
      "12",
      folder,
    );
    await first.end();
    const [file = ""] = await readdir(folder);
    const handle = await open(join(folder, file), "r+");
    const stride = 4096 + 4096;
    await handle.write(Buffer.of(9), 0, 1, 5 * stride + 4096 + 100);
    await handle.close();
    const second = await endingPool(
      JSON.stringify(one.tier.namespace),
      "never",
      "politely",
      "0",
      folder,
    );
    const answer = await one.ask(second.peer).done;
    expect(answer).toMatchObject({ tokens: one.model.generate(PROMPT, 4), cachedTokens: 5 * 4 });
  });
});

describe("a slow source", () => {
  it("that finds nothing for five seconds: the prompt is computed", async () => {
    const clock = manualClock();
    const [source, one] = [await tierMember({ clock }), await tierMember({ clock })];
    await source.ask().done;
    const lookUp = vi.spyOn(source.tier, "pin").mockReturnValue(new Promise(() => {}));
    const asked = one.ask(source.tier.localId);
    await expect.poll(() => lookUp.mock.calls.length).toBe(1);
    expect(one.engine.requestCounts()).toMatchObject({ waiting: 1 });
    clock.advance(5_000);
    const answer = await asked.done;
    expect(answer).toMatchObject({ tokens: one.model.generate(PROMPT, 4), cachedTokens: 0 });
  });

  it("whose blocks take longer than half a minute: they are given up, and nothing writes later", async () => {
    const clock = manualClock();
    const network = memoryNetwork({
      clock,
      latency: { latencyMs: 1, jitterMs: 0, bytesPerMs: 0.1, minPieces: 4, lingerMs: 1 },
    });
    const member = () => tierMember({ clock, transport: transportOf("memory", network) });
    const [source, one] = [await member(), await member()];
    await source.ask().done;
    const asked = one.ask(source.tier.localId);
    await expect.poll(() => source.tier.servedBlocks).toBe(12);
    await new Promise((resolve) => setTimeout(resolve, 50));
    clock.advance(30_000);
    const answer = await asked.done;
    expect(answer).toMatchObject({ tokens: one.model.generate(PROMPT, 4), cachedTokens: 0 });
    const served = () => {
      clock.advance(1_000);
      return source.tier.servedBlocks;
    };
    await expect.poll(served).toBe(0);
  });
});
