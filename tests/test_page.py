"""Self-contained HTML pages."""

import pytest

from bert_jax.tools.report import page


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A function (title, body, data) that writes a page whose script sets the title from `data`."""
    monkeypatch.setattr(page, "_HERE", tmp_path)
    (tmp_path / "page.css").write_text("main { color: rgb(1, 2, 3); }\n")
    (tmp_path / "tiny.js").write_text(
        "document.title = JSON.parse(document.getElementById('data').textContent).message;\n"
    )

    def make(title, body, data):
        path = tmp_path / "deep" / "page.html"
        page.write(path, page.page(title, body, "tiny.js", data))
        return path

    return make


def test_texts_are_escaped_and_displayed_verbatim(tiny, visit):
    result = "</script><script>document.title='lost'</script> <b> & é \u2028"
    opened = visit(tiny(result, page.table(["a", "b"], [[result, 1234567]]), {"message": result}))
    assert opened.title() == result
    assert opened.inner_text("h1") == opened.inner_text("tbody th") == " ".join(result.split(" "))
    assert opened.inner_text("td") == "1,234,567"
    assert (
        opened.evaluate("getComputedStyle(document.querySelector('main')).color") == "rgb(1, 2, 3)"
    )


def test_content_security_policy_blocks_network_requests(tiny, chromium):
    refused, opened = [], chromium.new_page()
    opened.on("requestfailed", lambda request: refused.append((request.url, request.failure)))
    url = "http://127.0.0.1:9/x.png"
    opened.goto(tiny("t", f"<img src='{url}'>", {"message": "t"}).as_uri())
    opened.close()
    assert refused == [(url, "csp")]
