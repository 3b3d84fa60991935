import { recordedLog } from "@kv/testing/recorded-log";
import { expect, it } from "vitest";
import { warmUp } from "./warm-up.js";

it.each(["round-robin", "prefix-aware"] as const)(
  "requests go through a proxy with %s, and leave no connection",
  async (routing) => {
    const sockets = () =>
      process.getActiveResourcesInfo().filter((name) => name.startsWith("TCP")).length;
    const before = sockets();
    const { log, events } = recordedLog();
    await warmUp({ warmUpMs: 100, settings: { routing: { prefill: routing } } }, log);
    expect(events).toEqual([]);
    await expect.poll(sockets).toBe(before);
  },
);
