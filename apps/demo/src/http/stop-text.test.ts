import { describe, expect, it } from "vitest";
import { StopText, stopsOf } from "./stop-text.js";

/** A tokenizer whose tokens are characters. */
const characters = {
  decode: (tokens: ArrayLike<number>) => String.fromCharCode(...Array.from(tokens)),
};

function run(text: string, stops: readonly string[]) {
  const output = new StopText(characters, stops);
  const pieces: string[] = [];
  for (let i = 0; i < text.length && output.stopped === undefined; i++)
    pieces.push(output.push(text.charCodeAt(i)));
  pieces.push(output.end());
  expect(pieces.join("")).toBe(output.shown);
  return { pieces, shown: output.shown, stopped: output.stopped };
}

describe("StopText", () => {
  it("withholds what may be the beginning of a stop string, and returns it when it is not", () => {
    expect(run("ababc", ["abc"]).pieces).toEqual(["", "", "ab", "", "", ""]);
    expect(run("ababx", ["abc"]).pieces).toEqual(["", "", "ab", "", "abx", ""]);
    expect(run("xab", ["abc"])).toMatchObject({ pieces: ["x", "", "", "ab"], stopped: undefined });
  });

  it("ends at the stop string that comes first", () => {
    expect(run("one. two! three", ["!", "."])).toMatchObject({ shown: "one", stopped: "." });
    expect(run("aaab", ["aab"])).toMatchObject({ shown: "a", stopped: "aab" });
    expect(run("text", [])).toMatchObject({ shown: "text", stopped: undefined });
  });

  it("ignores tokens after a stop string", () => {
    const output = new StopText(characters, ["."]);
    for (const character of "a.b") output.push(character.charCodeAt(0));
    expect([output.shown, output.end()]).toEqual(["a", ""]);
  });
});

it("stopsOf reads a string or a list, without empty strings", () => {
  expect([stopsOf("x"), stopsOf(["", "y"]), stopsOf(""), stopsOf(null)]).toEqual([
    ["x"],
    ["y"],
    [],
    [],
  ]);
});
