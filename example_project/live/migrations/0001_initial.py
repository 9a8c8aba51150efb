from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Delivery",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("event_key", models.CharField(max_length=255)),
                ("topic", models.CharField(max_length=100)),
                ("handler", models.CharField(max_length=100)),
                ("attempt", models.PositiveIntegerField()),
                ("worker", models.CharField(max_length=120)),
                ("at", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "verbose_name_plural": "deliveries",
            },
        ),
    ]
