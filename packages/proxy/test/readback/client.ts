import { expect } from "vitest";
import { post } from "../support/set-up.js";
import { idsOf, outputOf } from "./turn-servers.js";

type Fields = Record<string, unknown>;

/**
 * Sends a request and returns the text of its choices. What the client has not asked for must not
 * be in the answer.
 */
export async function ask(url: string, path: string, body: Fields): Promise<string[]> {
  const response = await post(`${url}${path}`, body);
  const text = await response.text();
  expect(response.status, text).toBe(200);
  expect(text).not.toContain("remote_request_id");
  expect(/token_ids":\s*\[/.test(text)).toBe(body.return_token_ids === true);
  if (body.stream !== true) {
    const { choices } = JSON.parse(text) as {
      choices: { text?: string; message?: { content: string } }[];
    };
    return choices.map((choice) => choice.text ?? choice.message?.content ?? "");
  }
  expect(text.endsWith("data: [DONE]\n\n")).toBe(true);
  const texts: string[] = [];
  for (const line of text.split("\n")) {
    if (!line.startsWith("data: {")) continue;
    const { choices } = JSON.parse(line.slice("data: ".length)) as {
      choices: { index: number; text?: string; delta?: { content?: string } }[];
    };
    for (const { index, text: piece, delta } of choices)
      texts[index] = (texts[index] ?? "") + (piece ?? delta?.content ?? "");
  }
  return texts;
}

/** What one engine would answer. */
export function expected(body: Fields): string[] {
  const ids = idsOf(body);
  return Array.from(
    { length: Number(body.n ?? 1) },
    (_, copy) => outputOf(ids, { ...body, seed: Number(body.seed ?? 0) + copy }).text,
  );
}
