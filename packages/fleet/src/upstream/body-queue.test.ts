import { expect, test } from "vitest";
import { BodyQueue } from "./upstream.js";

function setUp(highBytes?: number) {
  const queue = new BodyQueue(highBytes);
  const sender: string[] = [];
  const valve = { pause: () => sender.push("pause"), resume: () => sender.push("resume") };
  const push = (text: string) => queue.push(Buffer.from(text), valve);
  const next = async () => {
    const { done, value } = await queue.next();
    return done === true ? "END" : Buffer.from(value).toString();
  };
  return { queue, sender, push, next };
}

test("chunks that came between two reads are read as one, and none is lost", async () => {
  const { queue, push, next } = setUp();
  const first = next();
  push("a");
  push("b");
  push("c");
  expect([await first, await next()]).toEqual(["a", "bc"]);
  push("d");
  queue.end();
  expect([await next(), await next()]).toEqual(["d", "END"]);
});

test("the sender is paused above the limit, and resumed when the chunks are read", async () => {
  const { sender, push, next } = setUp(3);
  push("abc");
  expect(sender).toEqual([]);
  push("d");
  push("e");
  expect(sender).toEqual(["pause"]);
  expect(await next()).toBe("abcde");
  expect(sender).toEqual(["pause", "resume"]);
});

test("chunks before a failure are read before it", async () => {
  const { queue, push, next } = setUp();
  push("a");
  queue.fail(new Error("cut"));
  expect(await next()).toBe("a");
  await expect(next()).rejects.toThrow("cut");
});

test("an ended body within the limit is read without a wait", async () => {
  const { queue, push, next } = setUp();
  push("ab");
  push("cd");
  expect(queue.readBuffered(10)).toBeUndefined();
  queue.end();
  expect(queue.readBuffered(3)).toBeUndefined();
  expect(queue.readBuffered(4)?.bytes.toString()).toBe("abcd");
  expect(await next()).toBe("END");
});

test("a failed body is never read as complete", () => {
  const { queue, push } = setUp();
  push("ab");
  queue.fail(new Error("cut"));
  expect(queue.readBuffered(10)).toBeUndefined();
});

test("a limited read knows from the last chunk that the body has ended", async () => {
  const { queue, push } = setUp();
  push("ab");
  queue.end();
  expect(await queue.readLimited(2)).toEqual({ bytes: Buffer.from("ab"), complete: true });
});

test("a limited read ends above the limit, or when it has enough, and leaves the rest", async () => {
  const { queue, push, next } = setUp();
  push("abc");
  expect(await queue.readLimited(2)).toEqual({ bytes: Buffer.from("abc"), complete: false });
  push("de");
  const asked: string[] = [];
  const reading = queue.readLimited(9, (chunk) => {
    asked.push(Buffer.from(chunk).toString());
    return asked.includes("f");
  });
  await Promise.resolve();
  push("f");
  expect(await reading).toEqual({ bytes: Buffer.from("def"), complete: false });
  // Each chunk is asked about once, not all bytes with each.
  expect(asked).toEqual(["de", "f"]);
  push("g");
  expect(await next()).toBe("g");
});
