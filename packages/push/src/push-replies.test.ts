import { KvError, systemClock } from "@kv/interface";
import { expect, test } from "vitest";
import { PushReplies } from "./receive.js";

test("an agent that sends replies under very many names does not fill the memory", () => {
  const replies = new PushReplies({ clock: systemClock() });
  const error = new KvError("KV_GENERATION_STALE", "ended");
  for (let name = 0; name < 5000; name++) replies.add("done", "early", `forged ${name}`);
  const early = replies.open("early");
  expect(early.done.size).toBe(4096);
  const open = replies.open("open");
  for (let name = 0; name < 5000; name++) {
    replies.add("done", "open", `forged ${name}`);
    replies.ended("open", `forged ${name}`, error);
  }
  expect([open.done.size, open.ended.size]).toEqual([4096, 4096]);
});
