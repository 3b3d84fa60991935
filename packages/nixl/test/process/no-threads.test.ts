import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { describe, expect, test } from "vitest";
import { runChild } from "../support/run-child.js";

describe.skipIf(fakeMissing)(
  `when the kernel refuses a thread (${fakeMissing ?? "fake found"})`,
  () => {
    test.each([
      [
        "agent",
        /^KV_TRANSPORT_UNAVAILABLE: the thread of the agent "[^"]+" could not be started: /,
      ],
      ["memory", /^KV_MEMORY_INVALID: the thread that touches the memory could not be started: /],
    ])("for %s, that is an error, and the process goes on and exits", async (name, refused) => {
      // No thread gets the stack of one that has ended.
      const env = { FAKE_NIXL, GLIBC_TUNABLES: "glibc.pthread.stack_cache_size=0" };
      const end = await runChild("no-threads.ts", [name], { env, nodeOptions: ["--expose-gc"] });
      expect(end, end.stderr).toMatchObject({ code: 0, signal: null });
      expect(JSON.parse(end.stdout)).toEqual({
        refused: expect.stringMatching(refused),
        stopped: true,
      });
    });
  },
);
