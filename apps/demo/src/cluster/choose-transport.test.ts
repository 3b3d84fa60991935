import { KvError } from "@kv/interface";
import { afterEach, expect, test, vi } from "vitest";
import { chooseTransport } from "./choose-transport.js";

afterEach(() => vi.unstubAllEnvs());

test.each([undefined, "nixl"] as const)(
  "S5.1: a wrong NIXL_BACKEND is an error, no missing NIXL (asked for: %s)",
  async (requested) => {
    vi.stubEnv("NIXL_BACKEND", ",");
    const said: string[] = [];
    const error: unknown = await chooseTransport(requested, (line) => said.push(line)).catch(
      (reason: unknown) => reason,
    );
    expect(KvError.is(error, "KV_BACKEND_UNAVAILABLE") && error.message).toMatch(/NIXL_BACKEND/);
    expect(said).toEqual([]);
  },
);

test("the embedded transport needs no NIXL", async () => {
  vi.stubEnv("NIXL_BACKEND", ",");
  expect(await chooseTransport("memory", () => {})).toBe("memory");
});
