import type { KvErrorCode } from "@kv/interface";
import { expect, test } from "vitest";
import { neuronPlatform } from "./platform.js";

const refuses = (run: () => unknown, code: KvErrorCode) =>
  expect(run).toThrow(expect.objectContaining({ code }));

test.each(["trn1", "trn1n", "trn1.32xlarge", "trn1.2xlarge", "trn1n.32xlarge"])(
  "%s refuses what its compiler cannot handle, and registers no device memory",
  (family) => {
    const platform = neuronPlatform({ family });
    refuses(() => platform.check({ prefixCaching: true }), "KV_PLATFORM_UNSUPPORTED");
    refuses(() => platform.check({ maxNumSeqs: 2 }), "KV_PLATFORM_UNSUPPORTED");
    expect(platform.check({ prefixCaching: false, maxNumSeqs: 1 })).toEqual([]);
    expect(platform.capabilities.directRegistration).toEqual([]);
  },
);

test.each(["trn2", "trn2.48xlarge", "trn2u.48xlarge", "trn3"])(
  "%s warns, and names the direct registration of device memory",
  (family) => {
    const platform = neuronPlatform({ family });
    expect(
      platform.check({ prefixCaching: true, maxNumSeqs: 8 }).map(({ setting }) => setting),
    ).toEqual(["prefixCaching", "maxNumSeqs"]);
    expect(platform.capabilities.directRegistration?.map(({ backend }) => backend)).toEqual([
      "LIBFABRIC",
    ]);
  },
);

test("inf2 has no EFA, so its device memory is not registered", () => {
  expect(neuronPlatform({ family: "inf2.xlarge" }).capabilities.directRegistration).toEqual([]);
});

test.each(["", "p5.48xlarge", "trn", "trn1 ", "trn1.", "TRN1"])(
  "the family %j is refused",
  (family) => {
    refuses(() => neuronPlatform({ family }), "KV_CONFIG_INVALID");
  },
);

test("vLLM's option names are read", () => {
  const { check } = neuronPlatform();
  refuses(() => check({ enable_prefix_caching: true }), "KV_PLATFORM_UNSUPPORTED");
  refuses(() => check({ max_num_seqs: 2 }), "KV_PLATFORM_UNSUPPORTED");
  expect(check({ enable_prefix_caching: false, prefixCaching: false, max_num_seqs: 1 })).toEqual(
    [],
  );
});

test("S1.8: a setting that is missing is vLLM's default, which trn1 cannot handle", () => {
  const { check } = neuronPlatform();
  expect(() => check({})).toThrow("prefixCaching is not set, and vLLM's default is on");
  expect(() => check({ enable_prefix_caching: false, max_num_seqs: null })).toThrow(
    "maxNumSeqs is not set, and vLLM's default is 128 or more",
  );
});

test("S1.8: the spelling of vLLM's command line is read", () => {
  const { check } = neuronPlatform();
  refuses(() => check({ prefixCaching: false, "max-num-seqs": 2 }), "KV_PLATFORM_UNSUPPORTED");
  expect(check({ "enable-prefix-caching": false, "max-num-seqs": 1 })).toEqual([]);
  // The hint's own spelling.
  expect(check({ "max-num-seqs": 1, "no-enable-prefix-caching": true })).toEqual([]);
  expect(check({ max_num_seqs: 1, no_enable_prefix_caching: true })).toEqual([]);
  expect(() => check({ "max-num-seqs": 1, "no-enable-prefix-caching": false })).toThrow(
    "prefixCaching is true",
  );
  expect(() => check({ prefixCaching: true, "no-enable-prefix-caching": true })).toThrow(
    "prefixCaching is true and no-enable-prefix-caching is true",
  );
  expect(() => check({ prefixCaching: false, maxNumSeqs: 1, "max-num-seqs": 2 })).toThrow(
    "maxNumSeqs is 1 and max-num-seqs is 2",
  );
});

test("two names of one setting with different values, and values of the wrong type, are refused", () => {
  const { check } = neuronPlatform();
  expect(() => check({ prefixCaching: false, enable_prefix_caching: true })).toThrow(
    "prefixCaching is false and enable_prefix_caching is true",
  );
  refuses(() => check({ max_num_seqs: "1" }), "KV_CONFIG_INVALID");
  refuses(() => check({ max_num_seqs: 0 }), "KV_CONFIG_INVALID");
});

test("max_model_len of the engine comes before the model's max_position_embeddings", () => {
  const { maxModelLen } = neuronPlatform();
  expect(maxModelLen({ max_model_len: 1024, max_position_embeddings: 4096 })).toBe(1024);
  expect(maxModelLen({ max_position_embeddings: 4096 })).toBe(4096);
  refuses(
    () => maxModelLen({ max_model_len: 0, max_position_embeddings: 4096 }),
    "KV_CONFIG_INVALID",
  );
  refuses(() => maxModelLen({}), "KV_CONFIG_INVALID");
});
