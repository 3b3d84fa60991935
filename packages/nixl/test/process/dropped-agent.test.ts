import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { expect, test } from "vitest";
import { runChild } from "../support/run-child.js";

test.skipIf(fakeMissing)(
  "F9: an agent that is dropped without close is warned of, with the place of its creation, and ends with its transport",
  async () => {
    const { stdout, stderr } = await runChild("dropped-agent.ts", [FAKE_NIXL], {
      nodeOptions: ["--expose-gc", "--enable-source-maps"],
    });
    const { logged, running, left } = JSON.parse(stdout || stderr);
    expect(logged).toEqual([
      expect.objectContaining({
        event: "nixl-agent-dropped",
        agent: "dropped",
        created: expect.stringContaining("makeAgents"),
      }),
    ]);
    expect({ running, left }).toEqual({ running: 1, left: 0 });
  },
);
