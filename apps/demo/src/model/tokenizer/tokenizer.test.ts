import { cp, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeEach, expect, onTestFinished, test } from "vitest";
import reference from "../../../fixtures/model/bpe/expected.json" with { type: "json" };
import { TextStream } from "../../http/response-format.js";
import { prepareModel } from "../prepare-model.js";
import { loadTokenizer } from "./tokenizer.js";

const bpe = fileURLToPath(new URL("../../../fixtures/model/bpe", import.meta.url));

let scratch = "";
beforeEach(() => {
  scratch = scratchFolder(onTestFinished);
});

test("a byte-level BPE tokenizer gives the ids and texts of the reference implementation", async () => {
  const tokenizer = await loadTokenizer(bpe, 400);
  for (const { text, ids, decoded } of reference.texts) {
    expect([...tokenizer.encode(text)]).toEqual(ids);
    expect(tokenizer.decode(ids)).toBe(decoded);
  }
  expect([...tokenizer.encodeChat(reference.chat.messages)]).toEqual(reference.chat.ids);
  expect(tokenizer.decode([1], { skipSpecialTokens: false })).toBe("<|im_start|>");
  expect([tokenizer.decode([1]), tokenizer.decode([])]).toEqual(["", ""]);
});

test("a stream of tokens adds up to the whole text and never shows half a character", async () => {
  const tokenizer = await loadTokenizer(bpe, 400);
  for (const { ids, decoded } of reference.texts) {
    const stream = new TextStream(tokenizer);
    const parts = ids.map((token) => stream.push(token));
    expect(parts.join("") + stream.end()).toBe(decoded);
    expect(parts.join("")).not.toContain("\ufffd");
  }
  const cut = reference.texts[2]?.ids.slice(0, -1) ?? [];
  const stream = new TextStream(tokenizer);
  const text = cut.map((token) => stream.push(token)).join("") + stream.end();
  expect(text).toBe(tokenizer.decode(cut));
});

test("the built-in model has words t0, t1, … and a chat template of such words", async () => {
  const { directory } = await prepareModel(undefined, { cacheDirectory: scratch });
  const tokenizer = await loadTokenizer(directory, 1024);
  expect([...tokenizer.encode(" t12  t1023\n")]).toEqual([12, 1023]);
  // Ordinary words have a token by hash, none of those with a meaning of their own.
  const text = "t1024 the quick brown fox jumps over the lazy dog";
  const tokens = [...tokenizer.encode(text)];
  expect(tokens[1]).toBe(tokens[7]);
  expect(new Set(tokens).size).toBe(9);
  expect(tokens.every((token) => token >= 6 && token < 1024)).toBe(true);
  expect([...tokenizer.encode(text)]).toEqual(tokens);
  expect(tokenizer.decode([12, 2, 7])).toBe("t12 t7");
  expect(tokenizer.decode([12, 2, 7], { skipSpecialTokens: false })).toBe("t12 t2 t7");
  expect([...tokenizer.encodeChat([{ role: "user", content: "t10 t11" }])]).toEqual([3, 10, 11, 5]);
  const stream = new TextStream(tokenizer);
  expect([12, 2, 7].map((token) => stream.push(token))).toEqual(["t12", "", " t7"]);
});

test("a WordLevel tokenizer.json is read, and whole words are looked up", async () => {
  const json = {
    pre_tokenizer: { type: "WhitespaceSplit" },
    model: { type: "WordLevel", vocab: { no: 0, one: 1, two: 2 }, unk_token: "no" },
  };
  await writeFile(join(scratch, "tokenizer.json"), JSON.stringify(json));
  const tokenizer = await loadTokenizer(scratch, 3);
  expect([...tokenizer.encode("two one three")]).toEqual([2, 1, 0]);
  expect(() => tokenizer.encodeChat([{ role: "user", content: "one" }])).toThrow(
    expect.objectContaining({
      code: "KV_REQUEST_INVALID",
      message: expect.stringContaining("no chat template"),
    }),
  );
});

test("chat_template.jinja takes precedence, and a failing template names the reason", async () => {
  await cp(bpe, scratch, { recursive: true });
  await writeFile(join(scratch, "chat_template.jinja"), "{{ raise_exception('no system role') }}");
  const tokenizer = await loadTokenizer(scratch, 400);
  expect(() => tokenizer.encodeChat([])).toThrow(
    expect.objectContaining({
      code: "KV_REQUEST_INVALID",
      message: expect.stringContaining("no system role"),
    }),
  );
});

test("a missing or invalid tokenizer file is refused with its own code", async () => {
  const load = () => loadTokenizer(scratch, 1);
  await expect(load()).rejects.toMatchObject({ code: "KV_MODEL_UNSUPPORTED" });
  await writeFile(join(scratch, "tokenizer.json"), JSON.stringify({ model: { type: "Strange" } }));
  await expect(load()).rejects.toMatchObject({ code: "KV_MODEL_UNSUPPORTED" });
  await writeFile(join(scratch, "tokenizer.json"), "{");
  await expect(load()).rejects.toMatchObject({ code: "KV_CONFIG_INVALID" });
  await writeFile(join(scratch, "tokenizer_config.json"), JSON.stringify({ chat_template: 3 }));
  await expect(load()).rejects.toMatchObject({ message: expect.stringContaining("chat_template") });
});
