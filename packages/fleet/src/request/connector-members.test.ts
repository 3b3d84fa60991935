import { parseJsonPieces } from "@kv/http";
import { systemClock, YieldingQueue } from "@kv/interface";
import { vllmRequests } from "@kv/protocol";
import fc from "fast-check";
import { expect, test } from "vitest";
import {
  parseGenerationRequest,
  parseRequestInSteps,
  refuseConnectorMembers,
} from "./generation-request.js";
import type { Endpoint } from "./routes.js";

const ENDPOINTS: readonly Endpoint[] = [
  "/v1/completions",
  "/v1/chat/completions",
  "/v1/responses",
  "/v1/messages",
];

/** Members of a body, and the one that the refusal names. */
const WAYS: readonly (readonly [string, string])[] = [
  ['"kv_transfer_params":{"remote_host":"x"}', "kv_transfer_params"],
  ['"kv_transfer_params":""', "kv_transfer_params"],
  ['"kv_transfer_params":0', "kv_transfer_params"],
  ['"kv_transfer_params":false', "kv_transfer_params"],
  ['"ec_transfer_params":{"peer_host":"x"}', "ec_transfer_params"],
  ['"kv_hints":{"actions":[]}', "kv_hints"],
  ['"new_transfer_params":{}', "new_transfer_params"],
  ['"kv_of_a_later_vllm":1', "kv_of_a_later_vllm"],
  ['"ec_of_a_later_vllm":1', "ec_of_a_later_vllm"],
  ...['""', '"x"', "0", "[]", "{}", "null", '"{\\"remote_host\\":\\"x\\"}"'].map(
    (value) =>
      [`"vllm_xargs":{"kv_transfer_params":${value}}`, "vllm_xargs.kv_transfer_params"] as const,
  ),
  ['"vllm_xargs":{"a":1,"ec_transfer_params":"x"}', "vllm_xargs.ec_transfer_params"],
  ['"vllm_xargs":{"kv_hints":"x"}', "vllm_xargs.kv_hints"],
  ['"vllm_xargs":{"kv_cache_report_mode":"full"}', "vllm_xargs.kv_cache_report_mode"],
  ['"extra_args":{"kv_transfer_params":{}}', "extra_args.kv_transfer_params"],
  ['"extra_body":{"vllm_xargs":{"kv_transfer_params":0}}', "extra_body.vllm_xargs"],
  ['"sampling_params":{"extra_args":{"kv_transfer_params":[]}}', "sampling_params.extra_args"],
  ['"sampling_params":{"kv_transfer_params":[]}', "sampling_params.kv_transfer_params"],
  // The same names in other writings.
  ['"kv\\u005ftransfer_params":{}', "kv_transfer_params"],
  ['"\\u006bv_transfer\\u005Fparams":[1]', "kv_transfer_params"],
  ['"vllm\\u005fxargs":{"\\u006bv_transfer_params":"x"}', "vllm_xargs.kv_transfer_params"],
  // Of two members of one name, one parser takes the last one, and another one the first.
  ['"kv_transfer_params":{"remote_host":"x"},"kv_transfer_params":null', "kv_transfer_params"],
  ['"kv_transfer_params":null,"kv_transfer_params":{"remote_host":"x"}', "kv_transfer_params"],
  [
    '"kv\\u005ftransfer_params":{"remote_host":"x"}, "kv_transfer_params" : null',
    "kv_transfer_params",
  ],
  ['"ec_transfer_params":[],"ec_transfer_params":null', "ec_transfer_params"],
  ['"vllm_xargs":{"kv_transfer_params":"x"},"vllm_xargs":{}', "vllm_xargs"],
  ['"vllm_xargs":{"kv_transfer_params":"x"},"vllm_xargs":null', "vllm_xargs"],
  [
    '"vllm_xargs":{"kv_transfer_params":"x","kv_transfer_params":null}',
    "vllm_xargs.kv_transfer_params",
  ],
];

test.each(WAYS)("%s is refused at each route, and the refusal names it", (members, param) => {
  for (const endpoint of ENDPOINTS) {
    for (const text of [`{"prompt":"a",${members}}`, `{${members},"stream":true}`]) {
      expect(() => parseGenerationRequest(endpoint, Buffer.from(text))).toThrow(
        expect.objectContaining({
          code: "KV_REQUEST_INVALID",
          details: { param },
          message: expect.stringContaining(param) as string,
        }) as Error,
      );
    }
  }
});

test.each(WAYS)(
  "in a long body, before and after its long members, %s is refused",
  async (members, param) => {
    const long = `"prompt":"${"a".repeat(300_000)}"`;
    for (const text of [`{${members},${long}}`, `{${long},${members}}`])
      await expect(
        parseRequestInSteps(
          "/v1/completions",
          Buffer.from(text),
          new YieldingQueue({ clock: systemClock() }),
        ),
      ).rejects.toMatchObject({ code: "KV_REQUEST_INVALID", details: { param } });
  },
);

test("in a long body, a member is refused that occurs twice in different pieces, short or long", async () => {
  const filler = (name: string) => `"${name}":"${"a".repeat(300_000)}"`;
  const pad = `"remote_host":"${"h".repeat(9000)}"`;
  for (const first of [
    '"kv_transfer_params":{}',
    `"kv_transfer_params":{${pad}}`,
    '"kv_transfer_params":null',
  ])
    for (const second of ['"kv_transfer_params":null', '"\\u006bv_transfer_params":null'])
      for (const text of [
        `{${first},${second},${filler("a")}}`,
        `{${first},${filler("a")},${second}}`,
        `{${filler("a")},${first},${filler("b")},${second}}`,
      ])
        await expect(
          parseRequestInSteps(
            "/v1/completions",
            Buffer.from(text),
            new YieldingQueue({ clock: systemClock() }),
          ),
        ).rejects.toMatchObject({
          code: "KV_REQUEST_INVALID",
          details: { param: "kv_transfer_params" },
        });
});

test.each([
  '"kv_transfer_params":null',
  '"kv_transfer_params":null,"ec_transfer_params":null,"kv_hints":null',
  '"vllm_xargs":{"ngram_size":3,"words":["kv_transfer_params"]}',
  '"vllm_xargs":null',
  // Names that are no member of the request.
  '"prompt":"\\"kv_transfer_params\\": {}"',
  '"metadata":{"kv_transfer_params":"x"}',
  '"chat_template_kwargs":{"kv_cache":true}',
  '"tools":[{"type":"function","name":"f","parameters":{"properties":{"kv_transfer_params":{}}}}]',
])("%s passes", async (members) => {
  parseGenerationRequest("/v1/responses", Buffer.from(`{${members}}`));
  const long = Buffer.from(`{${members},"x":"${"a".repeat(300_000)}"}`);
  await parseRequestInSteps("/v1/responses", long, new YieldingQueue({ clock: systemClock() }));
});

/** What vLLM's decoders of text by diffusion read there. */
const SAMPLING = /^diffusion_/;

test.each([...vllmRequests()])("vLLM %s has no other way to its connector", (_, requests) => {
  const isRefused = (fields: Record<string, unknown>) => {
    try {
      refuseConnectorMembers(fields);
      return false;
    } catch {
      return true;
    }
  };
  const { "extra arguments read": read = [], "extra arguments written": written = [] } = requests;
  expect(read).toContain("kv_transfer_params");
  // What the engine reads there is refused in vllm_xargs, whose members come there unchanged.
  for (const name of read)
    expect(isRefused({ vllm_xargs: { [name]: "x" } }), name).toBe(!SAMPLING.test(name));
  for (const name of written) {
    const whole = name.startsWith("**")
      ? { [name.slice(2)]: { kv_transfer_params: "x" } }
      : { [name]: {} };
    expect(isRefused(whole), name).toBe(!SAMPLING.test(name));
  }
  // The engine gets nothing else about a connector; kv_hints come from vLLM's Rust front end.
  const engine = (requests["engine request"] ?? []).filter((name) => isRefused({ [name]: {} }));
  expect(engine).toEqual(["kv_hints"]);
  for (const route of ENDPOINTS) {
    const members = requests[`request ${route}`] ?? [];
    expect(members.filter((name) => isRefused({ [name]: {} })).sort()).toEqual([
      "ec_transfer_params",
      "kv_transfer_params",
    ]);
  }
});

test("a value that was read and is written anew has no second one", () => {
  refuseConnectorMembers({ kv_transfer_params: null });
  expect(() => refuseConnectorMembers({ vllm_xargs: { kv_transfer_params: 0 } })).toThrow(
    "vllm_xargs.kv_transfer_params",
  );
});

type Members = [key: string, value: unknown | { readonly members: Members }][];

/** JSON of an object whose members may repeat, with some characters of its strings as escapes. */
function written(members: Members, escapes: () => boolean): string {
  const text = (value: string) =>
    `"${Array.from(value, (character) =>
      escapes() ? `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}` : character,
    ).join("")}"`;
  const json = (value: unknown): string => {
    if (typeof value === "string") return text(value);
    if (typeof value === "object" && value !== null && "members" in value)
      return written(value.members as Members, escapes);
    return JSON.stringify(value);
  };
  return `{${members.map(([key, value]) => `${text(key)}:${json(value)}`).join(",")}}`;
}

/**
 * Whether some reader of the text, whichever of two members it takes, finds what reaches a
 * connector.
 */
function reaches(members: Members, inside = false): boolean {
  return members.some(([key, value]) => {
    if (/^(kv|ec)_|_transfer_params$/.test(key)) return inside || value !== null;
    const bag = ["vllm_xargs", "extra_args", "extra_body", "sampling_params"].includes(key);
    return bag && typeof value === "object" && value !== null && "members" in value
      ? reaches(value.members as Members, true)
      : false;
  });
}

test("whichever of two members a reader takes, and however names are written, nothing that is accepted reaches a connector", () => {
  const key = fc.constantFrom(
    "kv_transfer_params",
    "ec_transfer_params",
    "kv_hints",
    "vllm_xargs",
    "extra_args",
    "extra_body",
    "sampling_params",
    "prompt",
    "metadata",
    "x",
  );
  const { members } = fc.letrec<{ members: Members; value: unknown }>((tie) => ({
    members: fc.array(fc.tuple(key, tie("value")), { maxLength: 4 }) as fc.Arbitrary<Members>,
    value: fc.oneof(
      { depthSize: "small" },
      fc.constantFrom(null, null, 0, "", "x", "a".repeat(50)),
      fc.record({ members: tie("members") }),
    ),
  }));
  const isRefused = (read: () => void) => {
    try {
      read();
      return false;
    } catch {
      return true;
    }
  };
  let accepted = 0;
  fc.assert(
    fc.property(members, fc.array(fc.boolean(), { minLength: 1 }), (given, bits) => {
      let at = 0;
      const escapes = () => {
        at += 1;
        return bits[at % bits.length] === true;
      };
      const body = Buffer.from(written(given, escapes));
      const refused = [
        isRefused(() => parseGenerationRequest("/v1/completions", body)),
        // As of a long body, with short pieces and members that are taken as long.
        isRefused(() => {
          const parsing = parseJsonPieces(body, { pieceBytes: 32, longMemberBytes: 16 });
          let step = parsing.next();
          while (step.done !== true) step = parsing.next();
          refuseConnectorMembers(step.value.value as Record<string, unknown>, step.value);
        }),
      ];
      if (reaches(given)) expect(refused, body.toString()).toEqual([true, true]);
      else if (!refused.includes(true)) accepted += 1;
    }),
    { numRuns: 1000 },
  );
  expect(accepted).toBeGreaterThan(50);
});
