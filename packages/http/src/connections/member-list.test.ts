import { describe, expect, it } from "vitest";
import { MemberList } from "./member-list.js";

describe("MemberList", () => {
  it("keeps the order of joining", () => {
    const list = new MemberList<string>();
    const [first, second, third] = ["a", "b", "c"].map((value) => list.join(value));
    expect([list.oldest, list.size, list.values()]).toEqual(["a", 3, ["a", "b", "c"]]);
    if (second !== undefined) list.leave(second);
    expect(list.values()).toEqual(["a", "c"]);
    if (first !== undefined) list.leave(first);
    list.join("d");
    expect([list.oldest, list.values()]).toEqual(["c", ["c", "d"]]);
    if (third !== undefined) list.leave(third);
    expect(list.values()).toEqual(["d"]);
  });

  it("lets go of a member that leaves, which leaves once", () => {
    const list = new MemberList<string>();
    list.join("a");
    const member = list.join("b");
    list.join("c");
    list.leave(member);
    list.leave(member);
    expect(member).toEqual({ value: undefined, before: undefined, after: undefined });
    expect([list.size, list.values()]).toEqual([2, ["a", "c"]]);
  });

  it("is empty when all have left", () => {
    const list = new MemberList<number>();
    for (const member of [1, 2, 3].map((value) => list.join(value))) list.leave(member);
    expect([list.size, list.oldest, list.values()]).toEqual([0, undefined, []]);
  });
});
