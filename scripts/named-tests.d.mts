/** A test that a page names. */
export interface NamedTest {
  readonly file: string;
  /** A part of the test's full name. */
  readonly name: string;
}
/** A report of vitest, as far as it is read. */
export interface TestReport {
  readonly testResults: readonly {
    readonly name: string;
    readonly assertionResults: readonly { readonly fullName: string; readonly status: string }[];
  }[];
}
/** Pages that name tests. */
export const PAGES: readonly string[];
export function namedTests(text: string): NamedTest[];
export function namesNothing(test: NamedTest): boolean;
export function notShown(named: readonly NamedTest[], report: TestReport, whole?: boolean): NamedTest[];
