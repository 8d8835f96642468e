from typing import Any

from emberscale_trainer.data.compiled import kernel


def test_a_kernel_whose_cache_has_no_place_is_compiled_all_the_same() -> None:
    namespace: dict[str, Any] = {}
    exec("def twice(number):\n    return 2 * number\n", namespace)  # from no file, so its kernel cannot be cached
    assert kernel(namespace["twice"])(21) == 42
