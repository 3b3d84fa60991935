import { type Agent, silentLog } from "@kv/interface";
import { expect, test } from "vitest";
import { NotificationSender } from "./messages.js";

test("a notify call that throws synchronously is handled like one that rejects", async () => {
  const agent = {
    notify: () => {
      throw new Error("no such agent");
    },
  } as Partial<Agent> as Agent;
  const notifications = new NotificationSender({ agent, log: silentLog });
  const errors: string[] = [];
  const sent = notifications.send(
    "gone",
    new Uint8Array(1),
    (error) => void errors.push(String(error)),
  );
  expect(notifications.size).toBe(1);
  expect(await sent).toBe(false);
  expect(errors).toEqual(["Error: no such agent"]);
  await notifications.idle();
  expect(notifications.size).toBe(0);
});
